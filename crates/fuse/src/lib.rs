//! The FUSE file + loop device export
