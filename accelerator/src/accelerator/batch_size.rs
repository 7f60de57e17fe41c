use core::fmt;
use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Once;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use serde::{Deserialize, Serialize};

use crate::accelerator::Accelerator;
use crate::core::error::{Error, Kind, Result};
use crate::core::outcome::Failure;
use crate::core::panic_text::panic_text;
use crate::core::user_message;
use crate::optim::PreparedOptimizer;
use crate::reduce::{Reserved, Windows, forget_graphs, settle_device_reducer};

/// Finds the largest batch that memory holds, the same on every rank:
/// [`Accelerator::find_executable_batch_size`] with more to choose.
///
/// A computation without training, such as an evaluation, has no step to be counted:
///
/// ```
/// use accelerator::{Accelerator, BatchSizeFinder, Error};
///
/// let accelerator = Accelerator::new()?;
/// let finder = BatchSizeFinder::starting_at(128)
///     .with_next_size(|size| size / 2)
///     .with_out_of_memory(|text| text.contains("too big"));
/// let (size, ()) = finder.find(&accelerator, |size| {
///     assert!(size <= 50, "{size} is too big");
///     Ok::<_, Error>(())
/// })?;
/// assert_eq!(size, 32);
/// # Ok::<(), Error>(())
/// ```
#[must_use]
pub struct BatchSizeFinder<'a> {
    /// `None` for [`sounds_like_memory`].
    is_out_of_memory: Option<Box<Rule>>,
    reduce: Box<dyn Fn(usize) -> usize>,
    start: usize,
    models: Vec<Box<dyn Trained + 'a>>,
    windows: Windows,
}

/// A rule that tells if a text reports a lack of memory.
type Rule = dyn Fn(&str) -> bool;

/// A model with its optimizer.
trait Trained {
    /// Takes the memory that steps hold beside forward and backward.
    fn reserve(&self, accelerator: &Accelerator, windows: Windows) -> Result<Step>;

    /// Gives back what attempts recorded that failed.
    fn forget_graphs(&self);
}

/// The memory that the steps of a model hold.
struct Step {
    gradients: Reserved,
    _state: Option<ModuleOptimizer>,
}

impl<'a> BatchSizeFinder<'a> {
    /// Begins with so many samples, and tries nine tenths of them next.
    pub fn starting_at(samples: usize) -> Self {
        Self {
            is_out_of_memory: None,
            // As Accelerate rounds: down.
            reduce: Box::new(|size| (size as f64 * 0.9) as usize),
            start: samples,
            models: Vec::new(),
            windows: Windows::AsConfigured,
        }
    }

    /// Counts what optimizer steps of this model hold beside what an attempt computes: the buckets in which its
    /// gradients travel, and the state of its optimizer. Memory of that size is held while attempts run. Both must
    /// be prepared; a program with several models calls it for each.
    pub fn with_step_of<M: Module, S>(
        mut self,
        model: &'a M,
        optimizer: &'a PreparedOptimizer<S>,
    ) -> Self {
        self.models.push(Box::new((model, optimizer)));
        self
    }

    /// Counts steps of several batches, whose windows the program keeps open with
    /// [`no_sync`](crate::Weight::no_sync). Otherwise a step has as many as
    /// [`accumulation_steps`](Accelerator::accumulation_steps) says.
    pub fn with_windows_kept_open(mut self) -> Self {
        self.windows = Windows::KeptOpen;
        self
    }

    /// Sets the size to try after one that was too large. It must become smaller; a size that does not is
    /// made smaller by one.
    pub fn with_next_size(mut self, reduce: impl Fn(usize) -> usize + 'static) -> Self {
        self.reduce = Box::new(reduce);
        self
    }

    /// Sets the rule that tells, by their text, which errors and panics mean that memory did not suffice. By default,
    /// those that speak of memory, as allocators and the drivers of devices do; all others end the search. With a
    /// custom rule, panics of attempts are reported like any other panic.
    pub fn with_out_of_memory(mut self, is: impl Fn(&str) -> bool + 'static) -> Self {
        self.is_out_of_memory = Some(Box::new(is));
        self
    }

    /// Runs the search; see [`Accelerator::find_executable_batch_size`].
    ///
    /// # Errors
    ///
    /// The same as there.
    #[track_caller]
    pub fn find<T, E>(
        &self,
        accelerator: &Accelerator,
        mut attempt: impl FnMut(usize) -> Result<T, E>,
    ) -> Result<(usize, T), E>
    where
        E: From<Error> + fmt::Debug + 'static,
    {
        let group = &accelerator
            .group()
            .for_purpose("find_executable_batch_size");
        // Ranks may begin with what their own devices seem to hold.
        let starts = group.all_gather_object(&self.start).map_err(Error::from)?;
        let start = starts.into_iter().min().unwrap_or(self.start);
        if !self.models.is_empty() {
            settle_device_reducer(&accelerator.shared.reduction)?;
        }
        let mut steps = Vec::new();
        let mut size = start;
        let mut reason = None;
        while size > 0 {
            let mine = {
                let _quiet = self.is_out_of_memory.is_none().then(SilencePanics::begin);
                let attempt = || {
                    if reason.is_some() {
                        self.models.iter().for_each(|model| model.forget_graphs());
                    }
                    if steps.is_empty() {
                        let models = self.models.iter();
                        steps = models
                            .map(|model| model.reserve(accelerator, self.windows))
                            .collect::<Result<_>>()?;
                        settled(accelerator)?;
                    }
                    let value = attempt(size)?;
                    settled(accelerator)?;
                    Ok(value)
                };
                catch_unwind(AssertUnwindSafe(|| {
                    accelerator.shared.context.alone(attempt)
                }))
            };
            steps
                .iter()
                .for_each(|step: &Step| step.gradients.attempt_ends());
            let (report, mut held) = self.report(mine, size);
            let all = group.all_gather_object(&report).map_err(Error::from);
            let all = match all {
                Ok(all) => all,
                // What happened here comes before what it led to.
                Err(lost) => return Err(held.failure().unwrap_or_else(|| lost.into())),
            };
            for (rank, report) in all.iter().enumerate() {
                if let AttemptReport::Failed(failure) = report {
                    return Err(held.failure().unwrap_or_else(|| {
                        let failure = failure.clone();
                        let action = format!("try batches of {size} samples");
                        failure.into_error(rank, &action).into()
                    }));
                }
            }
            let full = all
                .iter()
                .enumerate()
                .filter_map(|(rank, report)| match report {
                    AttemptReport::OutOfMemory { next, text } => Some((*next, rank, text)),
                    AttemptReport::Done | AttemptReport::Failed(_) => None,
                });
            // The smallest of all ranks, where they reduce differently.
            let Some((next, rank, text)) = full.min_by_key(|(next, ..)| *next) else {
                if let AttemptMemory::Done(value) = held {
                    return Ok((size, value));
                }
                // Each rank has reported what it holds, and none has reported anything else.
                return Err(Error::misuse("a rank did not report its outcome").into());
            };
            if next > 0 && accelerator.is_main_process() {
                user_message::tell(&format!(
                    "batches of {size} samples do not fit (rank {rank} is out of memory), trying {next}"
                ));
            }
            reason = Some(format!("rank {rank}, with {size}: {text}"));
            // What was computed with a size that others cannot hold makes room.
            drop(held);
            size = next;
        }
        Err(Error::new(
            Kind::Memory,
            match reason {
                Some(reason) => format!(
                    "no batch size is small enough: from {} down to 1, every one was out of memory \
                     (last on {reason}); use a smaller model or another device",
                    start
                ),
                None => "the search for a batch size starts at 0; expected at least 1".to_owned(),
            },
        )
        .into())
    }

    /// Splits the outcome of an attempt into the report for the other ranks and the rest, which stays here.
    fn report<T, E: fmt::Debug + 'static>(
        &self,
        outcome: std::thread::Result<Result<T, E>>,
        size: usize,
    ) -> (AttemptReport, AttemptMemory<T, E>) {
        let (text, held) = match outcome {
            Ok(Ok(value)) => return (AttemptReport::Done, AttemptMemory::Done(value)),
            Ok(Err(error)) => (format!("{error:?}"), AttemptMemory::Error(error)),
            Err(panic) => (panic_text(&*panic), AttemptMemory::Panic(panic)),
        };
        let is_out_of_memory = match &self.is_out_of_memory {
            Some(is) => is(&text),
            None => sounds_like_memory(&text),
        };
        if is_out_of_memory {
            let next = (self.reduce)(size).min(size - 1);
            return (
                AttemptReport::OutOfMemory { next, text },
                AttemptMemory::Nothing,
            );
        }
        let failure = match &held {
            AttemptMemory::Error(error) => match (error as &dyn Any).downcast_ref::<Error>() {
                Some(error) => Failure::of(error),
                None => Failure::of(&Error::new(Kind::Device, text)),
            },
            _ => Failure::of(&Error::new(Kind::Panic, text)),
        };
        (AttemptReport::Failed(failure), held)
    }
}

impl<M: Module, S> Trained for (&M, &PreparedOptimizer<S>) {
    fn reserve(&self, accelerator: &Accelerator, windows: Windows) -> Result<Step> {
        let (model, optimizer) = *self;
        let model_state = accelerator.shared.reduction.models.find(model)?;
        // Buckets are there when the optimizer steps.
        let gradients = Reserved::of(&accelerator.shared.reduction, model_state.clone(), windows);
        let device = &accelerator.shared.context.device;
        let state = optimizer.reserve(model, model_state.parameters(), device);
        Ok(Step {
            gradients,
            _state: state,
        })
    }

    fn forget_graphs(&self) {
        forget_graphs(self.0);
    }
}

/// Waits for the device, which may find only then that its memory does not suffice.
fn settled(accelerator: &Accelerator) -> Result<()> {
    accelerator.shared.context.device.sync().map_err(|error| {
        let message = format!("the device could not compute what it was given: {error:?}");
        Error::new(Kind::Device, message)
    })
}

impl fmt::Debug for BatchSizeFinder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchSizeFinder")
            .field("start", &self.start)
            .finish_non_exhaustive()
    }
}

/// Batches that fit.
impl Accelerator {
    /// The largest number of samples, from `start` downwards by nine tenths (128, 115, 103, 92, …), for
    /// which `attempt` succeeds on every rank, with what it returned there.
    ///
    /// An attempt computes forward and backward on a batch of that size, with the prepared model, and by
    /// itself: a collective inside it, [`backward`](Self::backward) among them, is
    /// an error if there are several ranks, since one that runs out of memory would never come to
    /// it. Burn's own `loss.backward()` takes its place. After each attempt ranks compare; if one ran out of memory,
    /// all try the smallest of what ranks would try next.
    ///
    /// What a step holds beside that is counted: while attempts run, memory is held of the size of the buckets in
    /// which gradients travel and of the optimizer's state on this rank, and the first attempt begins with a step of a
    /// copy of the optimizer. Neither the model's parameters nor the optimizer change; layers with running statistics,
    /// such as `BatchNorm`, note what attempts compute. What the program itself keeps beside them, such as an average
    /// of weights, is counted if it is made before; what a communication hook keeps is not. For several models, or none, see [`BatchSizeFinder`].
    ///
    /// Out of memory is an attempt whose error or panic says so; see
    /// [`BatchSizeFinder::with_out_of_memory`]. Rank 0 says in a line what does not fit and what is tried next;
    /// such a panic of an attempt's own thread, which is caught, is not reported beside it: the first
    /// search puts a panic hook in front of the one that is there, which leaves out these alone. Where the system kills a process instead, as Linux does
    /// when the memory of the machine is used up, no attempt can tell.
    ///
    /// ```
    /// use accelerator::Error;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::AdamWConfig;
    /// use burn::tensor::Tensor;
    ///
    /// let sizes = accelerator::launch(2, |accelerator| {
    ///     let device = accelerator.device();
    ///     let model: Linear = accelerator.init(|device| LinearConfig::new(3, 1).init(device));
    ///     let (model, optimizer) = accelerator.prepare((model, AdamWConfig::new().init()))?;
    ///     // Rank 1 has less memory than rank 0.
    ///     let room = [110, 100][accelerator.rank()];
    ///     let attempt = |size| {
    ///         assert!(size <= room, "out of memory");
    ///         let loss = model.forward(Tensor::<2>::ones([size, 3], &device)).mean();
    ///         drop(loss.backward());
    ///         Ok::<_, Error>(())
    ///     };
    ///     let (size, ()) =
    ///         accelerator.find_executable_batch_size(128, &model, &optimizer, attempt)?;
    ///     Ok(size)
    /// })?;
    /// assert_eq!(sizes, [92, 92]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_out_of_memory`] on every rank when not even one sample fits; the attempt's own error
    /// where it failed otherwise, and on the other ranks an error that says so;
    /// [`Error::is_misuse`] for a model that was not prepared;
    /// [`Error::is_collective`] when another rank is lost.
    ///
    /// # Panics
    ///
    /// Panics with the attempt's own panic, if that is not for lack of memory.
    #[track_caller]
    pub fn find_executable_batch_size<M: Module, S, T, E>(
        &self,
        start: usize,
        model: &M,
        optimizer: &PreparedOptimizer<S>,
        attempt: impl FnMut(usize) -> Result<T, E>,
    ) -> Result<(usize, T), E>
    where
        E: From<Error> + fmt::Debug + 'static,
    {
        BatchSizeFinder::starting_at(start)
            .with_step_of(model, optimizer)
            .find(self, attempt)
    }
}

/// The outcome of an attempt, for the other ranks.
#[derive(Clone, Deserialize, Serialize)]
enum AttemptReport {
    Done,
    Failed(Failure),
    OutOfMemory { next: usize, text: String },
}

/// The rest of an attempt that stays on this rank.
enum AttemptMemory<T, E> {
    Done(T),
    Error(E),
    Nothing,
    Panic(Box<dyn Any + Send>),
}

impl<T, E> AttemptMemory<T, E> {
    /// The attempt's own error, or its panic again.
    fn failure(&mut self) -> Option<E> {
        match std::mem::replace(self, Self::Nothing) {
            Self::Error(error) => Some(error),
            Self::Panic(panic) => resume_unwind(panic),
            Self::Done(_) | Self::Nothing => None,
        }
    }
}

/// Keeps panics of this thread that report a lack of memory, and are caught, from being reported while it lives.
struct SilencePanics {
    /// The value from before.
    outer: bool,
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

impl SilencePanics {
    fn begin() -> Self {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let earlier = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                // The memory of a thread that is ending may be gone. Where panics abort, nothing is caught.
                let is_quiet = cfg!(panic = "unwind") && QUIET.try_with(Cell::get).unwrap_or(false);
                if !(is_quiet && info.payload_as_str().is_some_and(sounds_like_memory)) {
                    earlier(info);
                }
            }));
        });
        Self {
            outer: QUIET.replace(true),
        }
    }
}

impl Drop for SilencePanics {
    fn drop(&mut self) {
        QUIET.set(self.outer);
    }
}

fn sounds_like_memory(text: &str) -> bool {
    let text = text.to_lowercase();
    [
        "out of memory",
        "outofmemory",
        "out_of_memory",
        "memory allocation of",
        "cannot allocate memory",
        "alloc_failed",
        "buffertoobig",
    ]
    .iter()
    .any(|sign| text.contains(sign))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn tried(
        finder: impl Fn() -> BatchSizeFinder<'static> + Sync,
        room: [usize; 3],
    ) -> Result<Vec<(Vec<usize>, Result<usize>)>> {
        crate::launch(3, |accelerator| {
            let mut sizes = Vec::new();
            let found = finder().find(&accelerator, |size| {
                sizes.push(size);
                if size > room[accelerator.rank()] {
                    return Err(Error::new(Kind::Device, "CUDA_ERROR_OUT_OF_MEMORY"));
                }
                Ok(())
            });
            Ok((sizes, found.map(|(size, ())| size)))
        })
    }

    #[test]
    fn c20_sizes_are_those_of_accelerate_and_the_same_on_every_rank() {
        for (sizes, found) in tried(|| BatchSizeFinder::starting_at(128), [128, 73, 90]).unwrap() {
            assert_eq!(sizes, [128, 115, 103, 92, 82, 73]);
            assert_eq!(found.unwrap(), 73);
        }
    }

    #[test]
    fn c20_sizes_are_reduced_by_the_programs_own_rule() {
        let halves = || BatchSizeFinder::starting_at(64).with_next_size(|size| size / 2);
        for (sizes, found) in tried(halves, [10, 64, 64]).unwrap() {
            assert_eq!(sizes, [64, 32, 16, 8]);
            assert_eq!(found.unwrap(), 8);
        }
        // One that never ends is ended.
        let never = || BatchSizeFinder::starting_at(4).with_next_size(|size| size);
        for (sizes, found) in tried(never, [2; 3]).unwrap() {
            assert_eq!((sizes, found.unwrap()), (vec![4, 3, 2], 2));
        }
    }

    #[test]
    fn c20_nothing_fits_is_an_error_that_says_so() {
        for (sizes, found) in tried(|| BatchSizeFinder::starting_at(4), [4, 0, 4]).unwrap() {
            assert_eq!(sizes, [4, 3, 2, 1]);
            let error = found.unwrap_err();
            assert!(error.is_out_of_memory(), "{error:?}");
            let text = error.to_string();
            assert!(
                text.contains("from 4 down to 1") && text.contains("rank 1"),
                "{text}"
            );
        }
        let outcomes = crate::launch(2, |accelerator| {
            let start = [128, 100][accelerator.rank()];
            let found =
                BatchSizeFinder::starting_at(start).find(&accelerator, |_| Ok::<_, Error>(()));
            Ok(found?.0)
        });
        assert_eq!(outcomes.unwrap(), [100, 100], "ranks begin with the least");
        for (sizes, found) in tried(|| BatchSizeFinder::starting_at(0), [4; 3]).unwrap() {
            assert!(sizes.is_empty());
            assert!(found.unwrap_err().to_string().contains("starts at 0"));
        }
    }

    #[test]
    fn c20_what_is_no_want_of_memory_ends_the_search_on_every_rank() {
        let outcomes = crate::launch(2, |accelerator| {
            let found =
                BatchSizeFinder::starting_at(8).find(&accelerator, |_| match accelerator.rank() {
                    0 => Ok(()),
                    _ => Err(Error::new(Kind::Data, "the file has no header")),
                });
            Ok(found.unwrap_err())
        })
        .unwrap();
        assert!(outcomes[1].is_data(), "{:?}", outcomes[1]);
        let text = outcomes[0].to_string();
        assert!(text.contains("rank 1 failed to try batches of 8"), "{text}");
        assert!(text.contains("no header"), "{text}");
    }

    #[test]
    fn c20_a_panic_that_is_no_want_of_memory_is_a_panic() {
        let others = Mutex::new(Vec::new());
        let error = crate::launch(2, |accelerator| {
            let found = BatchSizeFinder::starting_at(8).find(&accelerator, |_| {
                assert!(accelerator.rank() == 0, "a wrong index");
                Ok::<_, Error>(())
            });
            others.lock().unwrap().push(found.unwrap_err());
            Ok(())
        })
        .unwrap_err();
        assert!(
            error.is_panic() && error.to_string().contains("a wrong index"),
            "{error:?}"
        );
        let others = others.into_inner().unwrap();
        assert_eq!(others.len(), 1);
        assert!(others[0].is_panic() && others[0].to_string().contains("rank 1 failed"));
    }

    /// Runs in a process of its own, so that nobody else writes to standard error.
    #[test]
    fn c20_a_size_that_does_not_fit_is_one_line_of_rank_zero() {
        const CHILD: &str = "BATCH_SIZE_TEST_CHILD";
        if std::env::var_os(CHILD).is_some() {
            let found = crate::launch(2, |accelerator| {
                let found = BatchSizeFinder::starting_at(10).find(&accelerator, |size| {
                    // Of another thread, which nobody catches for the attempt.
                    let other = std::thread::spawn(|| panic!("out of memory elsewhere"));
                    assert!(other.join().is_err());
                    assert!(size < 9, "out of memory here");
                    Ok::<_, Error>(())
                })?;
                let after = catch_unwind(|| panic!("out of memory afterwards"));
                assert!(after.is_err());
                Ok(found.0)
            });
            assert_eq!(found.unwrap(), [8, 8]);
            return;
        }
        let name =
            "accelerator::batch_size::tests::c20_a_size_that_does_not_fit_is_one_line_of_rank_zero";
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success(), "{told}");
        let count = |text: &str| told.matches(text).count();
        assert_eq!(count("batches of 10 samples do not fit"), 1, "{told}");
        assert_eq!(count("out of memory), trying 9"), 1, "{told}");
        assert_eq!(count("batches of 9 samples do not fit"), 1, "{told}");
        assert_eq!(count("out of memory here"), 0, "{told}");
        assert_eq!(count("out of memory elsewhere"), 6, "{told}");
        assert_eq!(count("out of memory afterwards"), 2, "{told}");
    }

    #[test]
    fn c20_a_search_leaves_training_as_it_was() {
        use burn::nn::{Linear, LinearConfig};
        use burn::optim::AdamWConfig;
        use burn::tensor::Tensor;

        use crate::prelude::{Overlap, Precision};

        let train = |largest: Option<usize>| {
            let builder = Accelerator::builder()
                .precision(Precision::Bf16)
                .overlap(Overlap::On);
            builder.launch(2, |accelerator| {
                let device = accelerator.device();
                let model: Linear = accelerator.init(|device| LinearConfig::new(5, 3).init(device));
                let optimizer = AdamWConfig::new().init();
                let (mut model, mut optimizer) = accelerator.prepare((model, optimizer))?;
                let loss = |model: &Linear, size| {
                    let input = accelerator.to_working(Tensor::<2>::ones([size, 5], &device));
                    let output = accelerator.forward(model, |model| model.forward(input));
                    accelerator.to_full(output).powi_scalar(2).mean()
                };
                if let Some(largest) = largest {
                    let attempt = |size| {
                        let loss = loss(&model, size);
                        assert!(size <= largest, "out of memory");
                        drop(loss.backward());
                        Ok::<_, Error>(())
                    };
                    let found =
                        accelerator.find_executable_batch_size(9, &model, &optimizer, attempt)?;
                    assert_eq!((found.0, optimizer.steps()), (largest, 0));
                }
                for _ in 0..6 {
                    let gradients = accelerator.backward(loss(&model, 2), &model, 2)?;
                    model = optimizer.step(0.1, model, gradients);
                }
                let report = accelerator.overlap_report(&model)?;
                Ok((model.weight.val().into_data(), format!("{report:?}")))
            })
        };
        assert_eq!(train(Some(4)).unwrap(), train(None).unwrap());
    }

    #[test]
    fn c20_an_attempt_that_communicates_is_refused() {
        let errors = crate::launch(2, |accelerator| {
            let found = BatchSizeFinder::starting_at(8)
                .find(&accelerator, |_| accelerator.wait_for_everyone());
            Ok(found.unwrap_err())
        })
        .unwrap();
        assert!(errors.iter().all(Error::is_misuse), "{errors:?}");
    }
}
