//! Persistent memory: map, copy, persist, survive poison
