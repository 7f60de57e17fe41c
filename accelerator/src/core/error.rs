use core::any::Any;
use core::fmt::{self, Display};
use std::error::Error as StdError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use accelerator_collective::internal::stderr_fallback;
use accelerator_host::error::chain;
use serde::{Deserialize, Serialize};

/// The result of this crate's operations.
pub type Result<T, E = Error> = core::result::Result<T, E>;

accelerator_host::define_error! {
    /// An error of this library, which says what went wrong, where, and what to do about it.
    ///
    /// The type is opaque: ask it with its predicates. Its `Debug` form is the message with its
    /// causes, so that `fn main() -> accelerator::Result<()>` ends with a text for people.
    ///
    /// ```
    /// use accelerator::Accelerator;
    ///
    /// let error = Accelerator::builder().accumulation_steps(0).build().unwrap_err();
    /// assert!(error.is_config());
    /// assert!(error.to_string().contains("accumulation_steps"));
    /// ```
    #[derive(Clone)]
    pub struct Error(Details);

    #[derive(Deserialize, Serialize)]
    pub(crate) enum Kind {
        /// Returns `true` if a checkpoint does not fit this program, is damaged, or none in the folder is whole; a hook
        /// that runs at a save or a resume failed; or two jobs saved into one folder at the same time.
        Checkpoint => is_checkpoint,
        /// Returns `true` if the communication with other ranks failed; see [`Error::collective`].
        Collective => is_collective,
        /// Returns `true` if a setting of the builder or the environment is unknown, out of range, or contradicts
        /// another one.
        Config => is_config,
        /// Returns `true` if a data set failed to deliver a sample.
        Data => is_data,
        /// Returns `true` if a device is not compiled in, is not there, or cannot do what was asked of it.
        Device => is_device,
        /// Returns `true` if the parameters of a model are no longer the same on every rank, or were updated
        /// differently on some; see
        /// [`AcceleratorBuilder::check_replicas_every`](crate::AcceleratorBuilder::check_replicas_every).
        Drift => is_drift,
        /// Returns `true` if a communication hook failed to reduce gradients, with an error of its own; see
        /// [`CommunicationHook`](crate::hook::CommunicationHook).
        Hook => is_hook,
        /// Returns `true` if a file could not be read or written.
        Io => is_io,
        /// Returns `true` if no batch is small enough for the memory of every rank; see
        /// [`find_executable_batch_size`](crate::Accelerator::find_executable_batch_size).
        Memory => is_out_of_memory,
        Misuse,
        /// Returns `true` if a model differs between ranks, or does not fit a file.
        Model => is_model,
        /// Returns `true` if what [local training](crate::local) would average is not finite on some rank, or too
        /// large to be added up; or if a loss is not finite and was set to
        /// [stop](crate::AcceleratorBuilder::stop_at_non_finite_loss) the training.
        NotFinite => is_not_finite,
        /// Returns `true` if it is the program's own; see [`Error::other`].
        Other => is_other,
        /// Returns `true` if a rank of [`launch`](crate::launch), a worker of a loader, or a communication hook
        /// panicked.
        Panic => is_panic,
    }
}

impl Error {
    /// Makes an error of the program's own, for a closure or a hook that this library calls, or for a function that
    /// returns this [`Result`]. It takes any error or text. The error reaches other ranks like the library's own. An
    /// error that is already of this type is returned unchanged.
    ///
    /// Errors of files have a conversion, so that `?` takes them.
    ///
    /// ```
    /// use accelerator::prelude::*;
    ///
    /// fn classes(text: &str) -> Result<usize> {
    ///     let classes = text.trim().parse().map_err(Error::other)?;
    ///     if classes == 0 {
    ///         return Err(Error::other("there are no classes"));
    ///     }
    ///     Ok(classes)
    /// }
    ///
    /// assert!(classes("ten").unwrap_err().is_other());
    /// assert_eq!(classes("0").unwrap_err().to_string(), "there are no classes");
    ///
    /// let accelerator = Accelerator::new()?;
    /// let missing = accelerator.main_process_first(|| Ok(std::fs::read_to_string("no/such/file")?));
    /// assert!(missing.unwrap_err().is_io());
    /// # Ok::<(), Error>(())
    /// ```
    pub fn other(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        match error.into().downcast::<Self>() {
            Ok(own) => *own,
            Err(other) => Self::new(Kind::Other, other.to_string()).with_source(other),
        }
    }

    /// A misuse that another rank met in something of that kind, in its words.
    pub(crate) fn misuse_in(kind: Kind, message: String) -> Self {
        Self::new(kind, message).with_details(Details { misuse: true })
    }

    /// Adds the batch that this rank was at, if ranks disagree about what they do together.
    pub(crate) fn at_batch(self, batch: impl fmt::Display) -> Self {
        let cause = self.collective().filter(|cause| cause.is_mismatch());
        match cause.cloned() {
            None => self,
            Some(cause) => {
                let message = format!("{self}; this rank called `backward` for {batch}");
                Self::new(self.kind(), message).with_source(cause)
            }
        }
    }

    /// Begins the message with the thing that the error is about.
    pub(crate) fn about(self, thing: impl fmt::Display) -> Self {
        let message = format!("{thing}: {self}");
        Self::new(self.kind(), message)
    }

    pub(crate) fn checkpoint(message: impl Into<String>) -> Self {
        Self::new(Kind::Checkpoint, message)
    }

    pub(crate) fn device(message: impl Into<String>) -> Self {
        Self::new(Kind::Device, message)
    }

    pub(crate) fn model(message: impl Into<String>) -> Self {
        Self::new(Kind::Model, message)
    }

    pub(crate) fn config(message: impl Into<String>) -> Self {
        Self::new(Kind::Config, message)
    }

    pub(crate) fn misuse(message: impl Into<String>) -> Self {
        Self::new(Kind::Misuse, message)
    }

    pub(crate) fn io(action: &str, path: &Path, source: std::io::Error) -> Self {
        Self::new(Kind::Io, format!("cannot {action} `{}`", path.display())).with_source(source)
    }

    /// Returns `true` if another rank is gone: it exited, was killed, is silent, or cannot be reached. The message
    /// names it.
    pub fn is_peer_lost(&self) -> bool {
        self.collective()
            .is_some_and(accelerator_collective::Error::is_peer_lost)
    }

    /// Returns the lost rank, if there is one: its number, host, process, and what is known about the cause.
    pub fn culprit(&self) -> Option<&accelerator_collective::Culprit> {
        self.collective()?.culprit()
    }

    /// Returns `true` if the library was used in a way that it does not support; the message says what to do
    /// instead.
    pub fn is_misuse(&self) -> bool {
        self.kind() == Kind::Misuse
            || self.0.details.misuse
            || self
                .collective()
                .is_some_and(accelerator_collective::Error::is_misuse)
    }

    /// Returns the communication error behind this one. Its predicates tell a lost peer from a timeout or a mismatch.
    pub fn collective(&self) -> Option<&accelerator_collective::Error> {
        let mut source = self.source();
        while let Some(error) = source {
            if let Some(found) = error.downcast_ref() {
                return Some(found);
            }
            source = error.source();
        }
        None
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&chain(self))
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Details {
    /// Set if another rank's error was a misuse by its own account.
    misuse: bool,
}

impl From<std::io::Error> for Error {
    /// Takes the message of the cause; [`Error::is_io`] holds.
    fn from(error: std::io::Error) -> Self {
        Self::new(Kind::Io, error.to_string()).with_source(error)
    }
}

impl From<accelerator_collective::Error> for Error {
    /// Takes the message of the cause, which names ranks and places.
    fn from(error: accelerator_collective::Error) -> Self {
        // What the variables or the builder said about the ranks is a setting like others.
        let kind = if error.is_topology() {
            Kind::Config
        } else {
            Kind::Collective
        };
        let mut message = error.to_string();
        if error.is_mismatch() {
            message.push_str(
                "; where one rank is in `backward` and another one is not, that one has left its loop earlier, or \
                 has left out a batch",
            );
        }
        Self::new(kind, message).with_source(error)
    }
}

impl From<accelerator_manifest::Error> for Error {
    /// Takes the message of the cause, which names the file.
    fn from(error: accelerator_manifest::Error) -> Self {
        let kind = if error.is_io() || error.is_not_found() {
            Kind::Io
        } else if error.is_misuse() {
            Kind::Misuse
        } else {
            Kind::Checkpoint
        };
        Self::new(kind, error.to_string()).with_source(error)
    }
}

impl From<accelerator_track::Error> for Error {
    fn from(error: accelerator_track::Error) -> Self {
        let message = error.to_string();
        match error.is_misuse() {
            true => Self::new(Kind::Misuse, message).with_source(error),
            false => Self::new(Kind::Io, message).with_source(error),
        }
    }
}

impl From<accelerator_plan::Error> for Error {
    fn from(error: accelerator_plan::Error) -> Self {
        Self::new(
            Kind::Config,
            format!("the samples cannot be shared out as asked: {error}"),
        )
    }
}

pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

pub(crate) fn caught<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let message = format!("{what} panicked: {}", panic_text(&*panic));
        Err(Error::new(Kind::Panic, message))
    })
}

#[derive(Debug, Default)]
pub(crate) struct Once(AtomicBool);

impl Once {
    pub(crate) fn first(&self) -> bool {
        !self.0.swap(true, Ordering::Relaxed)
    }
}

pub(crate) fn warn(text: &str) {
    tracing::warn!("{text}");
    stderr_fallback(text);
}

/// Reports what the user asked for.
pub(crate) fn tell(text: &str) {
    tracing::info!("{text}");
    stderr_fallback(text);
}

pub(crate) fn counted(count: usize, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        _ => format!("{count} {noun}s"),
    }
}

/// The one of `all` that is shown as `name`. An error lists them.
pub(crate) fn named<T: Copy + Display>(what: &str, name: &str, all: &[T]) -> Result<T> {
    let found = all.iter().find(|one| one.to_string() == name);
    found.copied().ok_or_else(|| {
        let names: Vec<_> = all.iter().map(T::to_string).collect();
        let expected = match names.split_last() {
            Some((last, [])) => last.clone(),
            Some((last, others)) => format!("{} or {last}", others.join(", ")),
            None => "nothing".to_owned(),
        };
        Error::config(format!("there is no {what} `{name}`; expected {expected}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_is_the_chain_of_causes() {
        let io = std::io::Error::new(std::io::ErrorKind::NotFound, "no such file");
        let error = Error::io("open", Path::new("model.safetensors"), io);
        assert_eq!(
            format!("{error:?}"),
            "cannot open `model.safetensors`: no such file"
        );
        assert!(error.is_io() && !error.is_model());
        let plan = Error::from(accelerator_plan::BatchSize::per_rank(0).unwrap_err());
        assert!(plan.to_string().contains("at least 1"), "{plan}");
    }

    #[test]
    fn an_error_of_the_program_keeps_its_causes_and_its_kind() {
        let read = || -> Result<()> { Err(std::io::Error::other("the disk is gone"))? };
        let error = read().unwrap_err();
        assert!(error.is_io() && !error.is_other(), "{error:?}");
        assert_eq!(format!("{error:?}"), "the disk is gone");
        // One of ours stays what it is, however it comes.
        assert!(Error::other(error).is_io());
        let boxed: Box<dyn StdError + Send + Sync> = Box::new(Error::misuse("no"));
        assert!(Error::other(boxed).is_misuse());
        let error = Error::other("x1".parse::<u8>().unwrap_err());
        assert!(error.is_other() && error.source().is_some());
    }

    #[cfg(feature = "flex")]
    #[test]
    fn an_error_of_the_program_travels() {
        let errors = crate::launch(2, |accelerator| {
            let failed = accelerator.main_process_first(|| {
                assert!(accelerator.is_main_process(), "rank 0 has failed");
                Err::<(), _>(Error::other("no labels"))
            });
            Ok(failed.unwrap_err())
        })
        .unwrap();
        for error in &errors {
            assert!(error.is_other(), "{error:?}");
        }
        assert!(
            errors[1].to_string().contains("rank 0 failed"),
            "{errors:?}"
        );
        assert!(errors[1].to_string().contains("no labels"), "{errors:?}");
    }

    #[test]
    fn an_unknown_name_is_told_with_all_that_are_known() {
        assert_eq!(named("number", "2", &[1, 2, 3]).unwrap(), 2);
        for (all, expected) in [
            (&[1, 2, 3][..], "there is no number `4`; expected 1, 2 or 3"),
            (&[1][..], "there is no number `4`; expected 1"),
        ] {
            let error = named("number", "4", all).unwrap_err();
            assert!(error.is_config());
            assert_eq!(error.to_string(), expected);
        }
    }
}
