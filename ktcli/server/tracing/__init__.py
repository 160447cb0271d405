"""OpenTelemetry traces of requests, where its packages are installed and its variables name a receiver."""
