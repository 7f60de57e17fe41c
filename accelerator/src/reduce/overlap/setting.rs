use core::fmt;
use core::str::FromStr;

use crate::core::choice::named;
use crate::core::error::{Error, Result};

/// The choice whether gradients are sent while backward still computes others.
///
/// It changes when bytes travel, and nothing else: results have the same bits. As text, the settings have the
/// names of `ACCEL_OVERLAP`.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Overlap {
    /// On if ranks are on several hosts, or compute on CUDA devices. On the CPUs of one host there is little
    /// to hide, and ranks that compute on all of its cores have none left over for sending.
    #[default]
    Auto,
    /// Sends buckets once backward has ended.
    Off,
    /// Sends buckets as soon as gradients are ready, if there is more than one rank.
    On,
}

impl Overlap {
    const ALL: [Self; 3] = [Self::Auto, Self::Off, Self::On];

    /// The name that `ACCEL_OVERLAP` takes: `auto`, `off` or `on`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Off => "off",
            Self::On => "on",
        }
    }
}

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Overlap {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        named("overlap", name, &Self::ALL)
    }
}
