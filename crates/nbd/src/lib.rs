//! The NBD export: server on unix socket and TCP, and a client for tests and the demo
