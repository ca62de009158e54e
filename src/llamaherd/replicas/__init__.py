"""One model several times, on the machines of a cluster, behind one server."""
