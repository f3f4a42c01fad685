# The CPU image of `bertsmith serve`. The engine is compiled when a container first starts, for the
# processor it is on (half a minute, which it says); a volume at /cache keeps that.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN python -m venv /opt/bertsmith \
 && /opt/bertsmith/bin/pip install --no-cache-dir torch --constraint constraints.txt \
    --index-url https://download.pytorch.org/whl/cpu
COPY src src
RUN /opt/bertsmith/bin/pip install --no-cache-dir --constraint constraints.txt '.[serve]'

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --no-create-home bertsmith \
 && mkdir /cache /models && chown bertsmith /cache
COPY --from=build /opt/bertsmith /opt/bertsmith
ENV PATH=/opt/bertsmith/bin:$PATH PYTHONUNBUFFERED=1 \
    BERTSMITH_CACHE=/cache NUMBA_CACHE_DIR=/cache/numba HF_HOME=/cache/huggingface
USER 10001
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/ready', timeout=4)"]
ENTRYPOINT ["bertsmith", "serve", "--host", "0.0.0.0"]
