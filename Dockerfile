# Router and simulated nodes in one image; compose and Kubernetes run one process of it per container. Envoy is not in it:
# it has an image of its own, and `kvreturn envoy-config` here makes its bootstrap.
FROM python:3.12-slim-trixie AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY extproc extproc
RUN python -m venv /opt/kvreturn \
 && /opt/kvreturn/bin/pip install --no-cache-dir -c constraints.txt '.[otlp,redis,uvloop]' envoy-data-plane \
 && /opt/kvreturn/bin/pip uninstall --yes pip \
 && install -d -o 10001 -g 10001 /out/bootstrap

FROM python:3.12-slim-trixie
COPY --from=build /opt/kvreturn /opt/kvreturn
# A named volume that is mounted there gets this owner.
COPY --from=build --chown=10001:10001 /out/bootstrap /bootstrap
ENV PATH=/opt/kvreturn/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
# Of a router; what runs simulated nodes replaces it.
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9091/healthz')"]
ENTRYPOINT ["kvreturn"]
CMD ["serve", "--config", "/etc/kvreturn/kvreturn.yaml"]
