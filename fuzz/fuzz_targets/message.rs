//! Feeds bytes to the readers of messages from strangers and from the store, before ranks are connected.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| accelerator_collective::internal::fuzz_messages(bytes));
