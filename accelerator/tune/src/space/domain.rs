use serde_json::Value;

use super::random::Random;
use crate::error::{Error, Result};

/// What a single value is drawn from. The functions of this crate make them, and files have their names.
///
/// ```
/// use accelerator_tune::{Domain, Parameter};
///
/// let lr: Parameter = Domain::LogUniform(1e-4, 1e-1).into();
/// ```
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

    /// Of a name and arguments that a file has.
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
                let is_multiple = |value: f64| {
                    let steps = value / q;
                    (steps - steps.round()).abs() < 1e-9 * steps.abs().max(1.0)
                };
                if !is_multiple(low) || !is_multiple(high) {
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
                let first = low.div_euclid(q) + i64::from(low.rem_euclid(q) != 0);
                let last = high.div_euclid(q);
                let offset = random.below(first.abs_diff(last) + 1);
                (first.wrapping_add_unsigned(offset) * q).into()
            }
            Self::LogRandInt(low, high) => log_int(random, low, high).into(),
            Self::QLogRandInt(low, high, q) => {
                let first = (low.div_euclid(q) + i64::from(low.rem_euclid(q) != 0)) * q;
                let last = high.div_euclid(q) * q;
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

    /// The nearest value within the bounds, of the domain's type.
    pub(crate) fn clamp(self, value: f64) -> Value {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "it saturates, and is clamped"
        )]
        let int = |low: i64, most: i64| (value.round() as i64).clamp(low, most).into();
        match self {
            Self::Uniform(low, high) | Self::LogUniform(low, high) => {
                value.clamp(low, high.next_down()).into()
            }
            Self::QUniform(low, high, q) | Self::QLogUniform(low, high, q) => {
                quantize(value, q).clamp(low, high).into()
            }
            Self::RandInt(low, high) | Self::LogRandInt(low, high) => int(low, high - 1),
            Self::QRandInt(low, high, _) | Self::QLogRandInt(low, high, _) => int(low, high),
            Self::Randn(..) => value.into(),
            Self::QRandn(_, _, q) => quantize(value, q).into(),
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

fn quantize(value: f64, q: f64) -> f64 {
    (value / q).round_ties_even() * q
}
