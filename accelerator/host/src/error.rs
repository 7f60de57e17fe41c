//! The one shape of this project's errors: an opaque type with a kind, a message and a cause.

use std::{error::Error, sync::Arc};

/// Declares an error type and its kinds, with a predicate for each kind.
///
/// The type is opaque, and cheap to clone. It displays its message. Its fields are those of [`Inner`]; the crate's own
/// are `Details` in `struct Error(Details);`. The crate that declares it gets the constructor `new`, the methods
/// `with_source`, `with_details` and `kind`, and the list `Kind::ALL`.
///
/// ```
/// mod store {
///     accelerator_host::define_error! {
///         /// The reason why something could not be stored.
///         #[derive(Clone, Debug)]
///         pub struct Error;
///
///         pub(crate) enum Kind {
///             /// Returns `true` if the store is full.
///             Full => is_full,
///             /// Returns `true` if the system failed.
///             Io => is_io,
///         }
///     }
///
///     pub fn store() -> Result<(), Error> {
///         let cause = std::io::Error::other("the cable was pulled");
///         Err(Error::new(Kind::Io, "cannot store: check the disk").with_source(cause))
///     }
/// }
///
/// let error = store::store().unwrap_err();
/// assert!(error.is_io() && !error.is_full());
/// assert_eq!(error.to_string(), "cannot store: check the disk");
/// assert_eq!(
///     accelerator_host::error::chain(&error),
///     "cannot store: check the disk: the cable was pulled"
/// );
/// ```
#[macro_export]
macro_rules! define_error {
    (
        $(#[$meta:meta])*
        $vis:vis struct $Error:ident $(($details:ty))?;

        $(#[$kind_meta:meta])*
        $kind_vis:vis enum $Kind:ident {
            $($(#[$doc:meta])* $kind:ident $(= $number:literal)? $(=> $is_kind:ident)?,)+
        }
    ) => {
        $(#[$meta])*
        $vis struct $Error(::std::sync::Arc<$crate::error::Inner<$Kind $(, $details)?>>);

        $(#[$kind_meta])*
        #[derive(Clone, Copy, Debug, Eq, PartialEq)]
        $kind_vis enum $Kind {
            $($kind $(= $number)?,)+
        }

        impl $Kind {
            $kind_vis const ALL: &'static [Self] = &[$(Self::$kind,)+];
        }

        impl $Error {
            $($crate::define_error! { @predicate [$(#[$doc])* $vis] $Kind::$kind $($is_kind)? })+

            pub(crate) fn new(kind: $Kind, message: impl Into<String>) -> Self {
                Self(::std::sync::Arc::new($crate::error::Inner {
                    kind,
                    message: message.into(),
                    details: Default::default(),
                    source: None,
                }))
            }

            pub(crate) fn with_source(
                mut self,
                source: impl Into<Box<dyn ::std::error::Error + Send + Sync>>,
            ) -> Self {
                let source: Box<dyn ::std::error::Error + Send + Sync> = source.into();
                ::std::sync::Arc::make_mut(&mut self.0).source = Some(source.into());
                self
            }

            $(
                pub(crate) fn with_details(mut self, details: $details) -> Self {
                    ::std::sync::Arc::make_mut(&mut self.0).details = details;
                    self
                }
            )?

            pub(crate) fn kind(&self) -> $Kind {
                self.0.kind
            }
        }

        impl ::std::fmt::Display for $Error {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(&self.0.message)
            }
        }

        impl ::std::error::Error for $Error {
            fn source(&self) -> Option<&(dyn ::std::error::Error + 'static)> {
                self.0.source.as_deref().map(|source| source as _)
            }
        }
    };
    (@predicate [$($head:tt)*] $Kind:ident::$kind:ident) => {};
    (@predicate [$($head:tt)*] $Kind:ident::$kind:ident $is_kind:ident) => {
        #[must_use]
        $($head)* fn $is_kind(&self) -> bool {
            self.0.kind == $Kind::$kind
        }
    };
}

/// The fields of an error that [`define_error!`](crate::define_error) declares.
#[derive(Clone, Debug)]
pub struct Inner<K, D = ()> {
    /// The kind, which the predicates test.
    pub kind: K,
    /// The message for people.
    pub message: String,
    /// The crate's own fields.
    pub details: D,
    /// The error that led to this one.
    pub source: Option<Arc<dyn Error + Send + Sync>>,
}

/// Joins the error and its causes in one line, without a cause that the line already contains.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
