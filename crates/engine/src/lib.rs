//! The cache: lanes, index, log, writeback, reclaim, recovery, and the tables of a transport
