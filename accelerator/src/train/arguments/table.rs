//! The table of arguments: each is a field with its default, a key of files, and a flag.

/// An argument, as command lines and messages know it.
#[derive(Debug)]
pub(super) struct Argument {
    pub(super) name: &'static str,
    /// Its description, in the words of its field.
    #[cfg_attr(not(feature = "clap"), allow(dead_code, reason = "flags show it"))]
    pub(super) help: &'static str,
    /// The type of its field.
    #[cfg_attr(not(feature = "clap"), allow(dead_code, reason = "flags show it"))]
    pub(super) type_name: &'static str,
}

/// Defines the struct of the arguments, its defaults, and `ARGUMENTS`.
macro_rules! arguments {
    (
        $(#[$of_struct:meta])*
        pub struct $struct:ident {
            $(
                #[doc = $help:literal]
                $(#[serde($($serde:tt)*)])?
                $name:ident: $type:ty = $default:expr,
            )+
        }
    ) => {
        $(#[$of_struct])*
        #[derive(Clone, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $struct {
            $(
                #[doc = $help]
                $(#[serde($($serde)*)])?
                pub $name: $type,
            )+
        }

        impl Default for $struct {
            fn default() -> Self {
                Self { $($name: $default,)+ }
            }
        }

        impl $struct {
            const ARGUMENTS: &'static [table::Argument] = &[
                $(table::Argument {
                    name: stringify!($name),
                    help: $help,
                    type_name: stringify!($type),
                }),+
            ];
        }
    };
}

pub(super) use arguments;
