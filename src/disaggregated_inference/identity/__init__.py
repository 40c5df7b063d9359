"""Who belongs to the cluster: its own authority, certificates, signatures, mutual TLS."""

from disaggregated_inference.identity.authority import Authority, IssuedCertificate
from disaggregated_inference.identity.certificates import PeerIdentity
from disaggregated_inference.identity.identity import VARIABLE, Identity, open_identity

__all__ = ["VARIABLE", "Authority", "Identity", "IssuedCertificate", "PeerIdentity", "open_identity"]
