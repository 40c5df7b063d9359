"""What people do with a cluster at a terminal: ask it something, talk to it, see how it is and what it did."""
