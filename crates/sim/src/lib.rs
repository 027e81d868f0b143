//! Simulated worlds: memory that crashes, disks that fail, oracles; tests only
