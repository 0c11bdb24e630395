# Runs before Envoy gets SIGTERM, which would cut its streams. The image has bash, but no HTTP client.
set -u
ask() {
  exec 3<>/dev/tcp/127.0.0.1/9901
  printf '%s %s HTTP/1.1\r\nHost: envoy\r\nConnection: close\r\n\r\n' "$1" "$2" >&3
  cat <&3
  exec 3>&-
}

ask POST /healthcheck/fail
sleep "${DRAIN_NOTICE:-10}" # until nobody sends new connections here any more
ask POST '/drain_listeners?inboundonly'
until ask GET '/stats?filter=^http.client.downstream_rq_active$' | grep -q 'downstream_rq_active: 0'; do
  sleep 1 # terminationGracePeriodSeconds ends it
done
