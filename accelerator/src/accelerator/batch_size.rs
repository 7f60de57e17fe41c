use core::fmt;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use burn::module::Module;
use serde::{Deserialize, Serialize};

use crate::accelerator::Accelerator;
use crate::core::agreement::Failure;
use crate::core::dyn_module::DynModule;
use crate::core::error::{self, Error, Kind, Result, panic_text};
use crate::core::module::visit_floats;
use crate::core::partition::is_sharded;
use crate::core::tensor::any_rank;

/// Batches that fit.
impl Accelerator {
    /// Returns the largest number of samples, from `start` down by nine tenths (128, 115, 103, 92, …), for which
    /// `attempt` succeeds on every rank, and the value that it returned on this one.
    ///
    /// An attempt computes forward and backward of `model` on a batch of that size, without the other ranks: a
    /// collective in it, [`backward`](Self::backward) included, is an error if there are several ranks, since a rank
    /// that runs out of memory would never reach it. Call Burn's own `loss.backward()` instead. Ranks compare after
    /// each attempt; if one ran out of memory, all try the next size. For several models, pass a tuple of clones:
    /// `&(generator.clone(), discriminator.clone())`.
    ///
    /// An attempt is out of memory if its error or panic says so, as those of allocators and drivers do. Rank 0 logs
    /// a line for each size that does not fit. The search cannot notice it if the system kills the process instead,
    /// as Linux does when the machine runs out of memory.
    ///
    /// `model` must be the one that the attempt uses, or a clone: if an attempt fails, its graph is freed through it.
    ///
    /// Memory that only a training step allocates is not counted: the buckets in which gradients travel, of the size
    /// of the model on several ranks, the optimizer's state, and what NCCL takes for itself. If they are large for the
    /// device, hold a tensor of their size in the attempt. The parameters do not change, but layers with running
    /// statistics, such as `BatchNorm`, update them in attempts.
    ///
    /// ```
    /// use accelerator::Error;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::Tensor;
    ///
    /// let sizes = accelerator::launch(2, |accelerator| {
    ///     let device = accelerator.device();
    ///     let model: Linear = accelerator.init(|device| LinearConfig::new(3, 1).init(device));
    ///     // Rank 1 has less memory than rank 0.
    ///     let room = [110, 100][accelerator.rank()];
    ///     let (size, ()) = accelerator.find_executable_batch_size(128, &model, |size| {
    ///         assert!(size <= room, "out of memory");
    ///         let loss = model.forward(Tensor::<2>::ones([size, 3], &device)).mean();
    ///         drop(loss.backward());
    ///         Ok::<_, Error>(())
    ///     })?;
    ///     Ok(size)
    /// })?;
    /// assert_eq!(sizes, [92, 92]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_out_of_memory`] on every rank if not even one sample fits; the attempt's own error
    /// if it failed otherwise, and on the other ranks an error that says so;
    /// [`Error::is_collective`] if another rank is lost.
    ///
    /// # Panics
    ///
    /// Panics with the attempt's own panic, unless that is for lack of memory.
    #[track_caller]
    pub fn find_executable_batch_size<M: Module + 'static, T, E>(
        &self,
        start: usize,
        model: &M,
        mut attempt: impl FnMut(usize) -> Result<T, E>,
    ) -> Result<(usize, T), E>
    where
        E: From<Error> + fmt::Debug + 'static,
    {
        if is_sharded(model) {
            return Err(E::from(Error::misuse(
                "`find_executable_batch_size` tries batch sizes on each rank separately, but sharded units need all \
                 ranks: set `units` to `recompute` for the search (activations take the same amount of memory)",
            )));
        }
        let group = &self.group().for_purpose("find_executable_batch_size");
        // Ranks may begin with what their own devices seem to hold.
        let starts = group.all_gather_object(&start).map_err(Error::from)?;
        let start = starts.into_iter().min().unwrap_or(start);
        let mut size = start;
        let mut reason = None;
        while size > 0 {
            let tried = || -> Result<T, E> {
                if reason.is_some() {
                    forget_graphs(model);
                }
                let value = attempt(size)?;
                self.wait_for_device()?;
                Ok(value)
            };
            let mine = catch_unwind(AssertUnwindSafe(|| self.shared.context.alone(tried)));
            self.shared.reduction.models.forget_working_copies();
            let report = AttemptReport::of(&mine);
            let all = group.all_gather_object(&report).map_err(Error::from);
            let full = match all.and_then(|all| first_full(all, size)) {
                Ok(full) => full,
                // What happened here comes before what it led to.
                Err(error) => match (report, mine) {
                    (AttemptReport::Failed(_), Ok(Err(mine))) => return Err(mine),
                    (AttemptReport::Failed(_), Err(panic)) => resume_unwind(panic),
                    _ => return Err(error.into()),
                },
            };
            let Some((rank, text)) = full else {
                return match mine {
                    Ok(value) => Ok((size, value?)),
                    Err(panic) => resume_unwind(panic),
                };
            };
            // As Accelerate rounds: down.
            let next = (size as f64 * 0.9) as usize;
            if next > 0 && self.is_main_process() {
                error::tell(&format!(
                    "batches of {size} samples do not fit (rank {rank} is out of memory), trying {next}"
                ));
            }
            reason = Some(format!("rank {rank}, with {size}: {text}"));
            size = next;
        }
        let message = match reason {
            Some(reason) => format!(
                "no batch size is small enough: from {start} down to 1, every one was out of memory \
                 (last on {reason}); use a smaller model or another device"
            ),
            None => "the search for a batch size starts at 0; expected at least 1".to_owned(),
        };
        Err(Error::new(Kind::Memory, message).into())
    }

    /// Waits for the device, which may find only then that its memory does not suffice.
    fn wait_for_device(&self) -> Result<()> {
        self.shared.context.device.sync().map_err(|error| {
            let message = format!("the device could not compute what it was given: {error:?}");
            Error::device(message)
        })
    }
}

#[derive(Deserialize, Serialize)]
enum AttemptReport {
    Done,
    Failed(Failure),
    OutOfMemory(String),
}

impl AttemptReport {
    fn of<T, E: fmt::Debug + 'static>(attempt: &thread::Result<Result<T, E>>) -> Self {
        let (text, error) = match attempt {
            Ok(Ok(_)) => return Self::Done,
            Ok(Err(error)) => (format!("{error:?}"), Some(error as &dyn Any)),
            Err(panic) => (panic_text(&**panic), None),
        };
        if sounds_like_memory(&text) {
            return Self::OutOfMemory(text);
        }
        Self::Failed(match error.map(<dyn Any>::downcast_ref::<Error>) {
            Some(Some(error)) => Failure::of(error),
            Some(None) => Failure::of(&Error::device(text)),
            None => Failure::of(&Error::new(Kind::Panic, text)),
        })
    }
}

/// Returns the first rank that is out of memory, with its message, or the error of the first that failed otherwise.
fn first_full(all: Vec<AttemptReport>, size: usize) -> Result<Option<(usize, String)>> {
    let mut full = None;
    for (rank, report) in all.into_iter().enumerate() {
        match report {
            AttemptReport::Done => {}
            AttemptReport::Failed(failure) => {
                return Err(failure.into_error(rank, &format!("try batches of {size} samples")));
            }
            AttemptReport::OutOfMemory(text) => full = full.or(Some((rank, text))),
        }
    }
    Ok(full)
}

/// Lets Burn forget forward passes of a model that no backward pass follows. It keeps what they recorded until
/// another backward runs in the same graph, as every one does that comes to one of the same parameters.
fn forget_graphs(model: &dyn DynModule) {
    let mut trained = Vec::new();
    visit_floats(model, |float| {
        if float.is_trained {
            trained.push(any_rank(&float.value));
        }
    });
    // The first to be in the graph frees it, before there is a gradient of a large one.
    trained.sort_by_key(|value| value.shape().num_elements());
    for value in trained {
        drop(value.sum().backward());
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

    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Tensor;

    use super::*;

    fn model(accelerator: &Accelerator) -> Linear {
        accelerator.init(|device| LinearConfig::new(5, 3).init(device))
    }

    fn tried(start: usize, room: [usize; 3]) -> Result<Vec<(Vec<usize>, Result<usize>)>> {
        crate::launch(3, |accelerator| {
            let mut sizes = Vec::new();
            let model = model(&accelerator);
            let found = accelerator.find_executable_batch_size(start, &model, |size| {
                sizes.push(size);
                if size > room[accelerator.rank()] {
                    return Err(Error::device("CUDA_ERROR_OUT_OF_MEMORY"));
                }
                Ok(())
            });
            Ok((sizes, found.map(|(size, ())| size)))
        })
    }

    /// Runs in a process of its own, so that nobody else writes to standard error.
    #[test]
    fn c20_a_size_that_does_not_fit_is_one_line_of_rank_zero() {
        const CHILD: &str = "BATCH_SIZE_TEST_CHILD";
        if std::env::var_os(CHILD).is_some() {
            let found = crate::launch(2, |accelerator| {
                let model = model(&accelerator);
                let found = accelerator.find_executable_batch_size(10, &model, |size| {
                    assert!(size < 9, "out of memory here");
                    Ok::<_, Error>(())
                })?;
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
        for size in [10, 9] {
            let line = format!("batches of {size} samples do not fit");
            assert_eq!(told.matches(&line).count(), 1, "{told}");
        }
    }

    #[test]
    fn c20_sizes_are_those_of_accelerate_and_the_same_on_every_rank() {
        for (sizes, found) in tried(128, [128, 73, 90]).unwrap() {
            assert_eq!(sizes, [128, 115, 103, 92, 82, 73]);
            assert_eq!(found.unwrap(), 73);
        }
    }

    #[test]
    fn c20_nothing_fits_is_an_error_that_says_so() {
        for (sizes, found) in tried(4, [4, 0, 4]).unwrap() {
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
            let model = model(&accelerator);
            let found =
                accelerator.find_executable_batch_size(start, &model, |_| Ok::<_, Error>(()));
            Ok(found?.0)
        });
        assert_eq!(outcomes.unwrap(), [100, 100], "ranks begin with the least");
        for (sizes, found) in tried(0, [4; 3]).unwrap() {
            assert!(sizes.is_empty());
            assert!(found.unwrap_err().to_string().contains("starts at 0"));
        }
    }

    #[test]
    fn c20_what_is_no_want_of_memory_ends_the_search_on_every_rank() {
        let outcomes = crate::launch(2, |accelerator| {
            let model = model(&accelerator);
            let found =
                accelerator.find_executable_batch_size(8, &model, |_| match accelerator.rank() {
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
            let model = model(&accelerator);
            let found = accelerator.find_executable_batch_size(8, &model, |_| {
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

    #[test]
    fn c20_a_search_leaves_training_as_it_was() {
        use burn::optim::AdamWConfig;

        use crate::prelude::{Overlap, Precision};

        let train = |largest: Option<usize>| {
            let builder = Accelerator::builder()
                .precision(Precision::Bf16)
                .overlap(Overlap::On);
            builder.launch(2, |accelerator| {
                let device = accelerator.device();
                let parts = (model(&accelerator), AdamWConfig::new().init());
                let (mut model, mut optimizer) = accelerator.prepare(parts)?;
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
                    let found = accelerator.find_executable_batch_size(9, &model, attempt)?;
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
            let model = model(&accelerator);
            let found = accelerator
                .find_executable_batch_size(8, &model, |_| accelerator.wait_for_everyone());
            Ok(found.unwrap_err())
        })
        .unwrap();
        assert!(errors.iter().all(Error::is_misuse), "{errors:?}");
    }
}
