"""Machines without systemd and launchd, such as containers: our own supervisor in the background."""

from disaggregated_inference.cluster.services.service import FileLogged, Service, ServiceFile, words


class Background(FileLogged):
    kind = "background"
    note = "nodes come back after a crash, but not after a reboot of the machine: run `disagg cluster up` then"

    def file(self, service: Service) -> ServiceFile:
        """The start command, for people who look."""
        return ServiceFile(f"{service.name}.sh", f"#!/bin/sh\n{self._command(service)}\n")

    def _command(self, service: Service) -> str:
        variables = [f"{name}={value}" for name, value in service.environment.items()]
        return words("exec", "env", *variables, *self.place.supervised(service, "--detach"))

    def start(self, service: Service) -> str:
        return f"cd {words(self.place.folder)} && ( {self._command(service)} )"

    def _supervisor(self, verb: str, service: Service) -> str:
        return words(*self.place.supervisor, f"--{verb}", "--state", self.place.state(service.name))

    def stop(self, service: Service) -> str:
        return f"test ! -e {words(self.place.state(service.name))} || {self._supervisor('stop', service)}"

    def remove(self, service: Service) -> str:
        return f"{self.stop(service)}; rm -f {words(self.place.state(service.name))}"

    def state(self, service: Service) -> str:
        missing = f"test ! -e {words(self.place.state(service.name))} && echo stopped"
        return f"{missing} || {self._supervisor('show', service)}"
