use std::fmt;

use serde_json::Value;

use crate::error::{Error, Result};

/// A distribution that a single value is drawn from. The functions of this crate make them, and files have their names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Domain {
    /// [`uniform`](crate::uniform).
    Uniform(f64, f64),
    /// [`quniform`](crate::quniform).
    QUniform(f64, f64, f64),
    /// [`loguniform`](crate::loguniform).
    LogUniform(f64, f64),
    /// [`qloguniform`](crate::qloguniform).
    QLogUniform(f64, f64, f64),
    /// [`randint`](crate::randint).
    RandInt(i64, i64),
    /// [`qrandint`](crate::qrandint).
    QRandInt(i64, i64, i64),
    /// [`lograndint`](crate::lograndint).
    LogRandInt(i64, i64),
    /// [`qlograndint`](crate::qlograndint).
    QLogRandInt(i64, i64, i64),
    /// [`randn`](crate::randn).
    Randn(f64, f64),
    /// [`qrandn`](crate::qrandn).
    QRandn(f64, f64, f64),
}

impl Domain {
    /// Every name that a file may have, with the number of its arguments.
    pub(crate) const NAMES: [(&str, usize); 10] = [
        ("uniform", 2),
        ("quniform", 3),
        ("loguniform", 2),
        ("qloguniform", 3),
        ("randint", 2),
        ("qrandint", 3),
        ("lograndint", 2),
        ("qlograndint", 3),
        ("randn", 2),
        ("qrandn", 3),
    ];

    /// Its name and arguments, as a file has them.
    pub(crate) fn to_file(self) -> (&'static str, Vec<Value>) {
        let floats = |values: &[f64]| values.iter().map(|value| (*value).into()).collect();
        let ints = |values: &[i64]| values.iter().map(|value| (*value).into()).collect();
        match self {
            Self::Uniform(low, high) => ("uniform", floats(&[low, high])),
            Self::QUniform(low, high, q) => ("quniform", floats(&[low, high, q])),
            Self::LogUniform(low, high) => ("loguniform", floats(&[low, high])),
            Self::QLogUniform(low, high, q) => ("qloguniform", floats(&[low, high, q])),
            Self::RandInt(low, high) => ("randint", ints(&[low, high])),
            Self::QRandInt(low, high, q) => ("qrandint", ints(&[low, high, q])),
            Self::LogRandInt(low, high) => ("lograndint", ints(&[low, high])),
            Self::QLogRandInt(low, high, q) => ("qlograndint", ints(&[low, high, q])),
            Self::Randn(mean, sd) => ("randn", floats(&[mean, sd])),
            Self::QRandn(mean, sd, q) => ("qrandn", floats(&[mean, sd, q])),
        }
    }

    /// Creates a distribution from a name and arguments in a file.
    pub(crate) fn from_file(name: &str, arguments: &[Value]) -> Result<Self> {
        let float = |index: usize| {
            let value = arguments.get(index).and_then(Value::as_f64);
            value.ok_or_else(|| Error::misuse(format!("argument {} is no number", index + 1)))
        };
        let int = |index: usize| {
            let value = arguments.get(index).and_then(Value::as_i64);
            value.ok_or_else(|| Error::misuse(format!("argument {} is no integer", index + 1)))
        };
        let domain = match name {
            "uniform" => Self::Uniform(float(0)?, float(1)?),
            "quniform" => Self::QUniform(float(0)?, float(1)?, float(2)?),
            "loguniform" => Self::LogUniform(float(0)?, float(1)?),
            "qloguniform" => Self::QLogUniform(float(0)?, float(1)?, float(2)?),
            "randint" => Self::RandInt(int(0)?, int(1)?),
            "qrandint" => Self::QRandInt(int(0)?, int(1)?, int(2)?),
            "lograndint" => Self::LogRandInt(int(0)?, int(1)?),
            "qlograndint" => Self::QLogRandInt(int(0)?, int(1)?, int(2)?),
            "randn" => Self::Randn(float(0)?, float(1)?),
            _ => Self::QRandn(float(0)?, float(1)?, float(2)?),
        };
        Ok(domain)
    }

    /// Fails where nothing can be drawn.
    pub(crate) fn check(self) -> Result<()> {
        let wrong = |what: &str| {
            let (name, arguments) = self.to_file();
            let arguments: Vec<_> = arguments.iter().map(Value::to_string).collect();
            Err(Error::misuse(format!(
                "{name}({}): {what}",
                arguments.join(", ")
            )))
        };
        let is_log = matches!(
            self,
            Self::LogUniform(..)
                | Self::QLogUniform(..)
                | Self::LogRandInt(..)
                | Self::QLogRandInt(..)
        );
        if let Some((low, high)) = self.bounds() {
            if !low.is_finite() || !high.is_finite() {
                return wrong("the bounds are finite");
            }
            if low >= high {
                return wrong("the lower bound is less than the upper one");
            }
            if is_log && low <= 0.0 {
                return wrong("the bounds of a logarithmic parameter are above 0");
            }
        }
        match self {
            Self::QUniform(low, high, q) | Self::QLogUniform(low, high, q) => {
                if q <= 0.0 || !q.is_finite() {
                    return wrong("the step is above 0");
                }
                if !is_multiple(low, q) || !is_multiple(high, q) {
                    return wrong("the bounds are multiples of the step");
                }
            }
            Self::QRandInt(low, high, q) | Self::QLogRandInt(low, high, q) => {
                if q <= 0 {
                    return wrong("the step is at least 1");
                }
                if low.div_euclid(q) == high.div_euclid(q) && low.rem_euclid(q) != 0 {
                    return wrong("no multiple of the step lies within the bounds");
                }
            }
            Self::Randn(mean, sd) | Self::QRandn(mean, sd, _) => {
                if !mean.is_finite() || !sd.is_finite() || sd < 0.0 {
                    return wrong(
                        "mean and standard deviation are finite, and the latter is not negative",
                    );
                }
                if let Self::QRandn(_, _, q) = self
                    && (q <= 0.0 || !q.is_finite())
                {
                    return wrong("the step is above 0");
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// A value.
    pub(crate) fn sample(self, random: &mut Random) -> Value {
        match self {
            Self::Uniform(low, high) => uniform(random, low, high).into(),
            Self::QUniform(low, high, q) => quantize(uniform(random, low, high), q).into(),
            Self::LogUniform(low, high) => log_uniform(random, low, high).into(),
            Self::QLogUniform(low, high, q) => quantize(log_uniform(random, low, high), q)
                .clamp(low, high)
                .into(),
            Self::RandInt(low, high) => {
                let offset = random.below(low.abs_diff(high));
                low.wrapping_add_unsigned(offset).into()
            }
            // As Ray, a step of 1 leaves the upper bound out.
            Self::QRandInt(low, high, 1) => Self::RandInt(low, high).sample(random),
            Self::QRandInt(low, high, q) => {
                let (first, last) = multiples(low, high, q);
                let offset = random.below((first / q).abs_diff(last / q) + 1);
                (first / q)
                    .wrapping_add_unsigned(offset)
                    .wrapping_mul(q)
                    .into()
            }
            Self::LogRandInt(low, high) => log_int(random, low, high).into(),
            Self::QLogRandInt(low, high, q) => {
                let (first, last) = multiples(low, high, q);
                #[expect(clippy::cast_precision_loss, reason = "bounds are far below 2^53")]
                let steps = (log_int(random, low, high) as f64 / q as f64).round_ties_even();
                #[expect(clippy::cast_possible_truncation, reason = "between the bounds")]
                let rounded = steps as i64 * q;
                rounded.clamp(first, last.max(first)).into()
            }
            Self::Randn(mean, sd) => (mean + sd * random.normal()).into(),
            Self::QRandn(mean, sd, q) => quantize(mean + sd * random.normal(), q).into(),
        }
    }

    /// Returns the value of the domain nearest to `value`.
    pub(crate) fn clamp(self, value: f64) -> Value {
        if let Some((first, last, q)) = self.integers() {
            #[expect(clippy::cast_precision_loss, reason = "steps are far below 2^53")]
            let steps = (value / q as f64).round();
            #[expect(
                clippy::cast_possible_truncation,
                reason = "it saturates, and is clamped"
            )]
            let nearest = (steps as i64).saturating_mul(q);
            return nearest.clamp(first, last.max(first)).into();
        }
        match self {
            Self::Uniform(low, high) | Self::LogUniform(low, high) => {
                value.clamp(low, high.next_down()).into()
            }
            Self::QUniform(low, high, q) | Self::QLogUniform(low, high, q) => {
                quantize(value, q).clamp(low, high).into()
            }
            Self::QRandn(_, _, q) => quantize(value.clamp(f64::MIN, f64::MAX), q).into(),
            _ => value.clamp(f64::MIN, f64::MAX).into(),
        }
    }

    /// Converts a value that a user has chosen to the domain's type; returns `None` if it is outside the domain. The
    /// upper bound of floats is inside.
    pub(crate) fn accept(self, value: &Value) -> Option<Value> {
        if let Some((first, last, q)) = self.integers() {
            let value = value.as_i64().or_else(|| {
                let whole = value.as_f64().filter(|value| value.fract() == 0.0)?;
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "it saturates, and is compared"
                )]
                let integer = whole as i64;
                Some(integer)
            })?;
            let is_there = (first..=last).contains(&value) && value % q == 0;
            return is_there.then(|| value.into());
        }
        let value = value.as_f64()?;
        let is_within = self
            .bounds()
            .is_none_or(|(low, high)| (low..=high).contains(&value));
        let is_there = is_within && self.step().is_none_or(|q| is_multiple(value, q));
        is_there.then(|| value.into())
    }

    /// Returns the least and the greatest integer, and the step; `None` for floats.
    fn integers(self) -> Option<(i64, i64, i64)> {
        match self {
            Self::RandInt(low, high)
            | Self::LogRandInt(low, high)
            | Self::QRandInt(low, high, 1) => Some((low, high - 1, 1)),
            Self::QRandInt(low, high, q) | Self::QLogRandInt(low, high, q) => {
                let (first, last) = multiples(low, high, q);
                Some((first, last, q))
            }
            _ => None,
        }
    }

    /// Returns the step of floats.
    fn step(self) -> Option<f64> {
        match self {
            Self::QUniform(_, _, q) | Self::QLogUniform(_, _, q) | Self::QRandn(_, _, q) => Some(q),
            _ => None,
        }
    }

    fn bounds(self) -> Option<(f64, f64)> {
        match self {
            Self::Uniform(low, high)
            | Self::QUniform(low, high, _)
            | Self::LogUniform(low, high)
            | Self::QLogUniform(low, high, _) => Some((low, high)),
            #[expect(clippy::cast_precision_loss, reason = "compared with each other only")]
            Self::RandInt(low, high)
            | Self::QRandInt(low, high, _)
            | Self::LogRandInt(low, high)
            | Self::QLogRandInt(low, high, _) => Some((low as f64, high as f64)),
            Self::Randn(..) | Self::QRandn(..) => None,
        }
    }
}

/// Describes the values of the domain.
impl fmt::Display for Domain {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((first, last, q)) = self.integers() {
            return match q {
                1 => write!(formatter, "an integer from {first} to {last}"),
                q => write!(formatter, "a multiple of {q} from {first} to {last}"),
            };
        }
        match self.step() {
            None => write!(formatter, "a number")?,
            Some(q) => write!(formatter, "a multiple of {q}")?,
        }
        match self.bounds() {
            None => Ok(()),
            Some((low, high)) => write!(formatter, " from {low} to {high}"),
        }
    }
}

fn uniform(random: &mut Random, low: f64, high: f64) -> f64 {
    (low + (high - low) * random.unit()).min(high.next_down())
}

fn log_uniform(random: &mut Random, low: f64, high: f64) -> f64 {
    let drawn = uniform(random, libm::log(low), libm::log(high));
    libm::exp(drawn).clamp(low, high.next_down())
}

fn log_int(random: &mut Random, low: i64, high: i64) -> i64 {
    #[expect(clippy::cast_precision_loss, reason = "bounds are far below 2^53")]
    let drawn = log_uniform(random, low as f64, high as f64);
    #[expect(clippy::cast_possible_truncation, reason = "between the bounds")]
    let floor = drawn.floor() as i64;
    floor.clamp(low, high - 1)
}

/// Returns the first and the last multiple of a step within bounds.
fn multiples(low: i64, high: i64, q: i64) -> (i64, i64) {
    let first = (low.div_euclid(q) + i64::from(low.rem_euclid(q) != 0)) * q;
    (first, high.div_euclid(q) * q)
}

fn is_multiple(value: f64, q: f64) -> bool {
    let steps = value / q;
    (steps - steps.round()).abs() < 1e-9 * steps.abs().max(1.0)
}

fn quantize(value: f64, q: f64) -> f64 {
    (value / q).round_ties_even() * q
}

/// Draws that follow from a seed and names: SplitMix64 (Steele, Lea and Flood 2014), begun at a hash of them.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// Creates the draws that follow from the seed and the names in `parts`.
    pub(crate) fn of(seed: u64, parts: &[&[u8]]) -> Self {
        let mut random = Self(seed);
        for part in parts {
            random.fold(part.len() as u64);
            for bytes in part.chunks(8) {
                let mut word = [0; 8];
                word[..bytes.len()].copy_from_slice(bytes);
                random.fold(u64::from_le_bytes(word));
            }
        }
        random
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Draws a number from 0 to below 1.
    pub(crate) fn unit(&mut self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "53 bits")]
        let bits = (self.next() >> 11) as f64;
        bits / 9_007_199_254_740_992.0
    }

    /// Draws a number from 0 to below `bound`, which is not 0: Lemire's multiplication without its rejection, whose
    /// bias is below 2⁻³² for bounds below 2³².
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        let wide = u128::from(self.next()) * u128::from(bound);
        (wide >> 64) as u64
    }

    /// Draws from the standard normal distribution (Box and Muller 1958).
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = libm::sqrt(-2.0 * libm::log(1.0 - self.unit()));
        radius * libm::cos(2.0 * std::f64::consts::PI * self.unit())
    }

    fn fold(&mut self, word: u64) {
        self.0 ^= word;
        self.0 = self.next();
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
