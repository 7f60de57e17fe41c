//! Feeds bytes to the reader of a peer's frames.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| accelerator_collective::internal::fuzz_frames(bytes));
