"""One endpoint that existing programs can use: public APIs over the orchestrator."""
