//! Feeds bytes to the reader of a checkpoint's manifest.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| accelerator_manifest::internal::fuzz_manifest(bytes));
