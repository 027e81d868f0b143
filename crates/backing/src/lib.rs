//! Backing devices: files and block devices through io_uring, and decorators
