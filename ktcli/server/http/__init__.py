"""HTTP: access control, request bodies and errors, and what the handlers of all APIs share."""
