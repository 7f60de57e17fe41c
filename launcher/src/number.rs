//! Small whole numbers in every element type.

use std::fmt::Debug;

use accelerator_collective::Element;
use half::{bf16, f16};

/// A type that holds small whole numbers exactly, and their sums as far as 127.
pub(crate) trait Small: Element + PartialEq + Debug {
    /// This number, which is at most 127.
    fn small(number: u8) -> Self;
}

macro_rules! small {
    ($($type:ty: $convert:expr),* $(,)?) => {
        $(impl Small for $type {
            fn small(number: u8) -> Self {
                $convert(number)
            }
        })*
    };
}

small! {
    f32: f32::from, f64: f64::from, u8: u8::from, u16: u16::from, u32: u32::from, u64: u64::from,
    i16: i16::from, i32: i32::from, i64: i64::from, f16: f16::from, bf16: bf16::from,
    // At most 127.
    i8: |number| number as i8,
}
