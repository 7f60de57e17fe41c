//! What a peer sends over an open connection.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| accelerator_collective::launcher::fuzz_frames(bytes));
