//! What a checkpoint says of itself.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| accelerator_manifest::internal::fuzz_manifest(bytes));
