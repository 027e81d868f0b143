//! The daemon: threads, configuration, control interface, metrics, restart
