//! What strangers and the store say before ranks are connected.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| accelerator_collective::launcher::fuzz_messages(bytes));
