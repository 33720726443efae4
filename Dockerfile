# specproxy with a CPU llama-server (the managed extra), as a user without rights.
#   docker build -t specproxy .
#   docker run --rm -p 127.0.0.1:8484:8484 -e SPECPROXY_TOKEN=… specproxy start --upstream http://host.docker.internal:11434
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY specproxy specproxy
RUN python -m venv /opt/specproxy \
    && /opt/specproxy/bin/pip install --no-cache-dir '.[managed]'

FROM python:3.12-slim
# llama-server is linked with OpenMP
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 specproxy \
    && install -d -o specproxy -g specproxy /state
COPY --from=build /opt/specproxy /opt/specproxy
USER 10001
# A port that is published is reached from outside the container, so SPECPROXY_TOKEN must be set.
ENV PATH=/opt/specproxy/bin:$PATH \
    SPECPROXY_HOST=0.0.0.0 \
    SPECPROXY_STATE_DIR=/state
VOLUME /state
EXPOSE 8484
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8484/specproxy/health', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["specproxy"]
CMD ["start"]
