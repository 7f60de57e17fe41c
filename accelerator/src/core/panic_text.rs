use core::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::error::{Error, Kind, Result};

/// Returns the message of a panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

/// Returns the result of `work`, or an error with the message of its panic.
pub(crate) fn caught<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let message = format!("{what} panicked: {}", panic_text(&*panic));
        Err(Error::new(Kind::Panic, message))
    })
}
