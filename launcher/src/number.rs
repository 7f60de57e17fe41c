//! Small whole numbers in every element type.

use std::fmt::Debug;

use accelerator_collective::Element;
use half::{bf16, f16};

/// A type that holds small whole numbers exactly, and their sums as far as 127.
pub(crate) trait Small: Element + PartialEq + Debug {
    /// This number, which is at most 127.
    fn small(number: u8) -> Self;

    /// This number, where the type holds it exactly.
    fn exact(number: u64) -> Option<Self>;
}

macro_rules! whole {
    ($($type:ty),*) => {
        $(impl Small for $type {
            fn small(number: u8) -> Self {
                // At most 127.
                number as Self
            }

            fn exact(number: u64) -> Option<Self> {
                Self::try_from(number).ok()
            }
        })*
    };
}

macro_rules! floating {
    ($($type:ty: $from:expr),* $(,)?) => {
        $(impl Small for $type {
            fn small(number: u8) -> Self {
                Self::from(number)
            }

            fn exact(number: u64) -> Option<Self> {
                let wide = number as f64;
                let value: Self = $from(wide);
                (f64::from(value) == wide && wide as u128 == u128::from(number)).then_some(value)
            }
        })*
    };
}

whole!(u8, u16, u32, u64, i8, i16, i32, i64);
floating! {
    f32: |wide| wide as f32,
    f64: |wide| wide,
    f16: f16::from_f64,
    bf16: bf16::from_f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_a_type_cannot_hold_are_none() {
        assert_eq!(i8::exact(127), Some(127));
        assert_eq!(i8::exact(128), None);
        assert_eq!(f16::exact(65_504), Some(f16::MAX));
        assert_eq!(f16::exact(65_536), None);
        assert_eq!(bf16::exact(257), None);
        assert_eq!(
            bf16::exact(3 << 60),
            Some(bf16::from_f64((3_u64 << 60) as f64))
        );
        assert_eq!(f32::exact((1 << 24) + 1), None);
        assert_eq!(f64::exact(u64::MAX), None);
    }
}
