//! Mistakes that are easy to make and would go unnoticed.

mod divergence;
mod epochs;
mod first_hour;
mod losses;
mod metrics;
mod models;
mod resuming;
mod steps;

use std::io::Write;
use std::sync::{Arc, Mutex};

use accelerator::prelude::*;

use crate::common::assert_contains;

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Returns what this thread logs during `work`, which must succeed.
fn log_of<T>(work: impl FnOnce() -> Result<T>) -> Result<String> {
    let (done, text) = logged(work);
    done.map(|_| text)
}

/// Asserts that rank 0 logs all of the words, the first of them once, and that no other rank logs anything.
#[track_caller]
fn assert_told_once(texts: &[String], words: &[&str]) {
    assert_eq!(texts[0].matches(words[0]).count(), 1, "{texts:?}");
    assert_contains(&texts[0], words);
    assert!(texts[1..].iter().all(String::is_empty), "{texts:?}");
}

/// Returns the result of `work` and what this thread logs meanwhile.
fn logged<T>(work: impl FnOnce() -> T) -> (T, String) {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .with_ansi(false)
        .finish();
    let value = tracing::subscriber::with_default(subscriber, work);
    let bytes = lines.0.lock().unwrap().clone();
    (value, String::from_utf8(bytes).unwrap())
}
