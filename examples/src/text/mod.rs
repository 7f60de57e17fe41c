//! Text as a sequence of characters, cut into samples.

mod bundled;
mod windows;

pub use self::windows::{TextBatch, TextBatcher, TextWindows, Vocabulary};
