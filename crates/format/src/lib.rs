//! Every byte on media: encode, decode, verify; no I/O
