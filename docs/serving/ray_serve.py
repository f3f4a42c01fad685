"""A classifier in Ray Serve: MODEL=runs/reviews serve run ray_serve:app

It is asked as /v1/classify is: {"text": "A fine film."} or a list to http://127.0.0.1:8000/.
"""

import os

from ray import serve
from starlette.requests import Request

import bertsmith


@serve.deployment(num_replicas=2, max_ongoing_requests=32, ray_actor_options={"num_cpus": 1})
class Classifier:
    """A replica with one thread; texts that come at the same time are computed together."""

    def __init__(self, folder: str) -> None:
        self.model = bertsmith.load(folder, device="cpu", precision="int8")

    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.002)
    async def classify(self, requests: list[list[str]]) -> list[list[dict]]:
        answers = self.model.classify([text for texts in requests for text in texts])
        found = iter({"label": own.label, "confidence": own.confidence} for own in answers)
        return [[next(found) for _ in texts] for texts in requests]

    async def __call__(self, request: Request) -> dict:
        text = (await request.json())["text"]
        return {"answers": await self.classify([text] if isinstance(text, str) else text)}


app = Classifier.bind(os.environ["MODEL"])
