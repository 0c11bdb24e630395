# Router, Envoy and simulated nodes in one image; compose and Kubernetes run one process of it per container.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY extproc extproc
RUN python -m venv /opt/kvreturn \
 && /opt/kvreturn/bin/pip install --no-cache-dir -c constraints.txt '.[envoy]'

FROM python:3.12-slim
COPY --from=build /opt/kvreturn /opt/kvreturn
ENV PATH=/opt/kvreturn/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --system --uid 10001 kvreturn
USER 10001
ENTRYPOINT ["kvreturn"]
CMD ["--help"]
