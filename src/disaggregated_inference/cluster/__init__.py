"""The cluster: its config file, deployment, status."""
