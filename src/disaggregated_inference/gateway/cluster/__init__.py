"""The gateway's own paths: health, cluster status, history, events, tokenize."""
