"""A server for models: HTTP routes, a page, and existing clients' protocols. No other room uses it.

In: folders of models and `ServingSettings`. Out: an HTTP server until it is told to stop. Start:
`server.py` (processes and signals), then `application.py` (a request's way), `routes.py` (what may
be asked), `batching.py` (how requests share the model).
"""
