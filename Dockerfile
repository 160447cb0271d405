# kt on the CPU, in a container: docker build -t kt . && docker run --rm -it -v kt:/library kt chat
# It runs as a user without rights. Models, chats and settings are in the volume /library. kt serve listens on loopback
# unless told otherwise (--host), so the server is reached with --network host.

FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
COPY . /src
RUN pip install --no-cache-dir --prefix /opt/kt -c /src/constraints.txt /src

FROM python:3.12-slim
COPY --from=build /opt/kt /usr/local
RUN useradd --uid 1000 --create-home kt && install -d -o kt -g kt /library
ENV KT_HOME=/library XDG_CONFIG_HOME=/library/config
USER kt
VOLUME /library
ENTRYPOINT ["kt"]
CMD ["--help"]
