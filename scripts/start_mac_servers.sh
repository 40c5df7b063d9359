#!/bin/sh
# Start the decode nodes of the cluster file.
exec "$(dirname "$0")/disagg" cluster up --role decode "$@"
