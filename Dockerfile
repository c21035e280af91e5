# fleetd for Linux boxes and DGX Sparks: `docker build --target cpu -t fleetd:cpu .`, or `--target cuda`.
# docs/install.md says how it is run. MLX's packages bring CUDA's libraries, so both variants have one base; the
# driver comes from the host, by NVIDIA's Container Toolkit.

# glibc 2.41; MLX needs 2.35.
ARG PYTHON=python:3.13-slim-trixie

FROM ${PYTHON} AS wheel
# Git's tags say the version (pyproject.toml), and are not here.
ARG VERSION=0.1.0.dev0
ENV SETUPTOOLS_SCM_PRETEND_VERSION_FOR_FLEETD=${VERSION}
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY fleetd ./fleetd
COPY fleetctl ./fleetctl
COPY systemd ./systemd
COPY launchd ./launchd
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM ${PYTHON} AS base
# A number of its own, so that a folder of the host can be given to it.
RUN useradd --uid 10001 --create-home fleetd \
    && install --directory --owner fleetd --group fleetd --mode 0700 /home/fleetd/state
ENV FLEETD_HOME=/home/fleetd/state \
    PYTHONUNBUFFERED=1
WORKDIR /home/fleetd
VOLUME /home/fleetd/state
# It says whether the daemon answers. The first start makes keys, and reads the machine.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 CMD ["fleetctl", "status"]
CMD ["fleetd", "run"]

FROM base AS cuda
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    wheel=$(echo /dist/fleetd-*.whl) && pip install --no-cache-dir "fleetd[cuda] @ file://$wheel"
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001

# The last stage is what a build without --target makes.
FROM base AS cpu
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist pip install --no-cache-dir /dist/fleetd-*.whl
USER 10001:10001
