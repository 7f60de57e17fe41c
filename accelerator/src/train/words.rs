//! Settings that are one of several words, in files, on command lines and in messages.

use accelerator_host::text::most_alike;

use crate::core::error::{Error, Result};

/// Defines an enum whose variants have names, by which it is parsed, shown, and read and written by serde.
macro_rules! words {
    (
        $(#[$attribute:meta])*
        $visibility:vis enum $name:ident: $what:literal {
            $($(#[$of_variant:meta])* $variant:ident = $word:literal,)+
        }
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, Eq, PartialEq, serde::Deserialize, serde::Serialize)]
        #[serde(try_from = "String", into = "&'static str")]
        #[non_exhaustive]
        $visibility enum $name {
            $(
                #[doc = concat!("`", $word, "`.")]
                $(#[$of_variant])*
                $variant,
            )+
        }

        impl $name {
            const WORDS: &'static [(&'static str, Self)] = &[$(($word, Self::$variant)),+];
        }

        impl From<$name> for &'static str {
            fn from(value: $name) -> Self {
                match value {
                    $($name::$variant => $word,)+
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = crate::Error;

            fn try_from(word: String) -> crate::Result<Self> {
                word.parse()
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.pad((*self).into())
            }
        }

        impl core::str::FromStr for $name {
            type Err = crate::Error;

            fn from_str(word: &str) -> crate::Result<Self> {
                $crate::train::words::find($what, Self::WORDS, word)
            }
        }
    };
}

pub(super) use words;

pub(super) fn find<T: Copy>(what: &str, words: &[(&str, T)], word: &str) -> Result<T> {
    let found = words.iter().find(|(known, _)| *known == word);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let known: Vec<_> = words.iter().map(|(word, _)| *word).collect();
        let nearest = nearest(word, known.iter().copied());
        Error::config(format!(
            "{what}: there is no {word:?}{nearest}; expected one of {}",
            known.join(", ")
        ))
    })
}

/// ` (did you mean "…"?)`, where one of `known` is near.
pub(super) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> String {
    match most_alike(word, known) {
        Some((nearness, known)) if nearness > NEAR => format!(" (did you mean {known:?}?)"),
        _ => String::new(),
    }
}

const NEAR: f64 = 0.45;

/// Settings of the library's own that are words, for serde.
pub(super) mod word {
    use core::fmt::Display;
    use core::str::FromStr;

    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(crate) fn serialize<T: Display, S: Serializer>(
        value: &T,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(crate) fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
        from: D,
    ) -> Result<T, D::Error> {
        let word = String::deserialize(from)?;
        word.parse().map_err(de::Error::custom)
    }
}
