use std::fmt;

use serde_json::Value;

use crate::error::{Error, Result};

/// A distribution that a single value is drawn from, by its bounds, or mean and standard deviation, and the step to whose
/// multiples values are rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Domain {
    Float(Scale, f64, f64, Option<f64>),
    Int(Scale, i64, i64, Option<i64>),
    Normal(f64, f64, Option<f64>),
}

/// The scale on which numbers are uniform.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Scale {
    Linear,
    Log,
}

impl Domain {
    /// Every name that a file may have. Those with a `q` have a step as third argument.
    pub(crate) const NAMES: [&str; 10] = [
        "uniform",
        "quniform",
        "loguniform",
        "qloguniform",
        "randint",
        "qrandint",
        "lograndint",
        "qlograndint",
        "randn",
        "qrandn",
    ];

    /// Its name and arguments, as a file has them.
    pub(crate) fn to_file(self) -> (String, Vec<Value>) {
        let (name, mut arguments, step): (_, Vec<Value>, Option<Value>) = match self {
            Self::Float(scale, low, high, step) => {
                let name = scale.named("uniform");
                (name, vec![low.into(), high.into()], step.map(Into::into))
            }
            Self::Int(scale, low, high, step) => {
                let name = scale.named("randint");
                (name, vec![low.into(), high.into()], step.map(Into::into))
            }
            Self::Normal(mean, sd, step) => {
                let name = "randn".to_owned();
                (name, vec![mean.into(), sd.into()], step.map(Into::into))
            }
        };
        match step {
            None => (name, arguments),
            Some(step) => {
                arguments.push(step);
                (format!("q{name}"), arguments)
            }
        }
    }

    /// Creates a distribution from one of [`NAMES`](Self::NAMES) and the arguments in a file.
    pub(crate) fn from_file(name: &str, arguments: &[Value]) -> Result<Self> {
        let float = |index: usize| {
            let value = arguments.get(index).and_then(Value::as_f64);
            value.ok_or_else(|| Error::misuse(format!("argument {} is no number", index + 1)))
        };
        let int = |index: usize| {
            let value = arguments.get(index).and_then(Value::as_i64);
            value.ok_or_else(|| Error::misuse(format!("argument {} is no integer", index + 1)))
        };
        let (name, step) = match name.strip_prefix('q') {
            Some(name) => (name, Some(2)),
            None => (name, None),
        };
        let (name, scale) = match name.strip_prefix("log") {
            Some(name) => (name, Scale::Log),
            None => (name, Scale::Linear),
        };
        let float_step = || step.map(float).transpose();
        Ok(match name {
            "uniform" => Self::Float(scale, float(0)?, float(1)?, float_step()?),
            "randint" => Self::Int(scale, int(0)?, int(1)?, step.map(int).transpose()?),
            _ => Self::Normal(float(0)?, float(1)?, float_step()?),
        })
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
        if let Some((low, high)) = self.bounds() {
            if !low.is_finite() || !high.is_finite() {
                return wrong("the bounds are finite");
            }
            if low >= high {
                return wrong("the lower bound is less than the upper one");
            }
            let is_log = matches!(
                self,
                Self::Float(Scale::Log, ..) | Self::Int(Scale::Log, ..)
            );
            if is_log && low <= 0.0 {
                return wrong("the bounds of a logarithmic parameter are above 0");
            }
        }
        if let Self::Normal(mean, sd, _) = self
            && !(mean.is_finite() && sd.is_finite() && sd >= 0.0)
        {
            return wrong("mean and standard deviation are finite, and the latter is not negative");
        }
        if self.step().is_some_and(|q| q <= 0.0 || !q.is_finite()) {
            return wrong("the step is above 0");
        }
        match self {
            Self::Float(_, low, high, Some(q))
                if !(is_multiple(low, q) && is_multiple(high, q)) =>
            {
                wrong("the bounds are multiples of the step")
            }
            Self::Int(.., Some(q)) if q <= 0 => wrong("the step is at least 1"),
            Self::Int(_, low, high, Some(q))
                if low.div_euclid(q) == high.div_euclid(q) && low.rem_euclid(q) != 0 =>
            {
                wrong("no multiple of the step lies within the bounds")
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn sample(self, random: &mut Random) -> Value {
        match self {
            Self::Float(Scale::Linear, low, high, q) => {
                quantize(uniform(random, low, high), q).into()
            }
            Self::Float(Scale::Log, low, high, q) => {
                let drawn = quantize(log_uniform(random, low, high), q);
                drawn.clamp(low, high).into()
            }
            Self::Int(Scale::Linear, low, high, q) => {
                let (first, last, q) = multiples(Scale::Linear, low, high, q);
                let offset = random.below((first / q).abs_diff(last / q) + 1);
                let steps = (first / q).wrapping_add_unsigned(offset);
                steps.wrapping_mul(q).into()
            }
            Self::Int(Scale::Log, low, high, None) => log_int(random, low, high).into(),
            Self::Int(Scale::Log, low, high, Some(q)) => {
                let (first, last, q) = multiples(Scale::Log, low, high, Some(q));
                #[expect(clippy::cast_precision_loss, reason = "bounds are far below 2^53")]
                let steps = (log_int(random, low, high) as f64 / q as f64).round_ties_even();
                #[expect(clippy::cast_possible_truncation, reason = "between the bounds")]
                let rounded = steps as i64 * q;
                rounded.clamp(first, last.max(first)).into()
            }
            Self::Normal(mean, sd, q) => quantize(mean + sd * random.normal(), q).into(),
        }
    }

    /// Returns the value of the domain nearest to `value`.
    pub(crate) fn clamp(self, value: f64) -> Value {
        match self {
            Self::Float(_, low, high, None) => value.clamp(low, high.next_down()).into(),
            Self::Float(_, low, high, q) => quantize(value, q).clamp(low, high).into(),
            Self::Normal(_, _, q) => quantize(value.clamp(f64::MIN, f64::MAX), q).into(),
            Self::Int(scale, low, high, q) => {
                let (first, last, q) = multiples(scale, low, high, q);
                #[expect(clippy::cast_precision_loss, reason = "steps are far below 2^53")]
                let steps = (value / q as f64).round();
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "it saturates, and is clamped"
                )]
                let nearest = (steps as i64).saturating_mul(q);
                nearest.clamp(first, last.max(first)).into()
            }
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
            Self::Int(scale, low, high, q) => Some(multiples(scale, low, high, q)),
            Self::Float(..) | Self::Normal(..) => None,
        }
    }

    fn step(self) -> Option<f64> {
        match self {
            Self::Float(.., q) | Self::Normal(.., q) => q,
            Self::Int(..) => None,
        }
    }

    fn bounds(self) -> Option<(f64, f64)> {
        match self {
            Self::Float(_, low, high, _) => Some((low, high)),
            #[expect(clippy::cast_precision_loss, reason = "compared with each other only")]
            Self::Int(_, low, high, _) => Some((low as f64, high as f64)),
            Self::Normal(..) => None,
        }
    }
}

impl Scale {
    fn named(self, linear: &str) -> String {
        match self {
            Self::Linear => linear.to_owned(),
            Self::Log => format!("log{linear}"),
        }
    }
}

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

/// Returns the first and the last integer within bounds, and the step between two.
pub(crate) fn multiples(scale: Scale, low: i64, high: i64, step: Option<i64>) -> (i64, i64, i64) {
    match (scale, step) {
        // As Ray, a step of 1 leaves the upper bound out.
        (_, None) | (Scale::Linear, Some(1)) => (low, high - 1, 1),
        (_, Some(q)) => {
            let first = (low.div_euclid(q) + i64::from(low.rem_euclid(q) != 0)) * q;
            (first, high.div_euclid(q) * q, q)
        }
    }
}

fn is_multiple(value: f64, q: f64) -> bool {
    let steps = value / q;
    (steps - steps.round()).abs() < 1e-9 * steps.abs().max(1.0)
}

fn quantize(value: f64, q: Option<f64>) -> f64 {
    q.map_or(value, |q| (value / q).round_ties_even() * q)
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

    /// Draws an index into a list of so many, of which there is one at least.
    pub(crate) fn index(&mut self, count: usize) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "below a count in memory")]
        let index = self.below(count as u64) as usize;
        index
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
