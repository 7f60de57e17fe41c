use burn::module::Module;

use super::Accelerator;
use crate::core::error::Result;
use crate::model::sync_buffers;
use crate::replicas;

/// Checks and synchronizes the state of a model on all ranks.
impl Accelerator {
    /// Compares the parameters of a prepared model between all ranks, bit for bit.
    ///
    /// The ranks of a job hold the same parameters after every step: each computes the same
    /// update from the same averaged gradients. Where one does not, something outside of that
    /// changed its copy: code that runs on some ranks only, a random choice in the forward pass
    /// that touches parameters, a bit flip in memory. From then on the ranks silently train different models.
    /// [`check_replicas_every`](crate::AcceleratorBuilder::check_replicas_every) does this check
    /// during training, and [`valid`](Self::valid), [`save_model`](Self::save_model) and
    /// [`save_state`](Self::save_state) do it for the models that they are given. Those compare what is trained: to read
    /// what is frozen as well, most of a large model that is fine-tuned, would cost more than they do. This method
    /// compares both.
    ///
    /// Each rank hashes its parameters, and 32 bytes travel; measured on a 2-core machine, 7 MB
    /// of parameters take 3 ms. Buffers, such as the running statistics of a batch norm, are
    /// every rank's own and not compared.
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    ///
    /// let outcomes = accelerator::launch(3, |accelerator| {
    ///     let model: Linear = accelerator.init(|device| LinearConfig::new(2, 2).init(device));
    ///     let mut model = accelerator.prepare(model)?;
    ///     accelerator.check_replicas(&model)?;
    ///     if accelerator.rank() == 1 {
    ///         model.weight = model.weight.map(|weight| {
    ///             (weight + 1e-3).detach().require_grad()
    ///         });
    ///     }
    ///     Ok(accelerator.check_replicas(&model).unwrap_err())
    /// })?;
    /// for error in outcomes {
    ///     assert!(error.is_drift());
    ///     assert!(error.to_string().contains("rank 1") && error.to_string().contains("`weight`"));
    /// }
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_drift`](crate::Error::is_drift) on every rank, naming the ranks that differ from the majority, or all
    /// of them if there is none, and the first path that differs; [`Error::is_misuse`](crate::Error::is_misuse) for a
    /// model that was not prepared; [`Error::is_collective`](crate::Error::is_collective) when another rank is lost.
    #[track_caller]
    pub fn check_replicas<M: Module>(&self, model: &M) -> Result<()> {
        replicas::check_all(&self.shared.reduction, &self.shared.tracking, model)
    }

    /// Gives every rank the running statistics of all: each has seen its own share of the data.
    ///
    /// Means are averaged, and a `running_var` becomes the variance of everything that the ranks have
    /// seen, `mean(var + mean²) − mean(mean)²`. Any other buffer that a module keeps in a `RunningState` is
    /// averaged. What is the same on all ranks stays as it is, to the bit, and costs eight bytes. Parameters,
    /// trained or frozen, are neither compared nor touched.
    ///
    /// All ranks have the same weight, since a running statistic does not hold its number of samples. Where ranks
    /// train on unequal shares for long, or one is often idle, use [`SyncBatchNorm`](crate::nn::SyncBatchNorm), which
    /// weights by samples.
    ///
    /// [`save_model`](Self::save_model) and [`save_state`](Self::save_state) do this by themselves, and
    /// [`valid`](Self::valid) for evaluation. An emergency checkpoint holds the writer's own.
    ///
    /// ```
    /// use burn::nn::{BatchNorm, BatchNormConfig};
    /// use burn::tensor::Tensor;
    ///
    /// let means = accelerator::launch(2, |accelerator| {
    ///     let device = accelerator.device();
    ///     let model: BatchNorm = accelerator.prepare(BatchNormConfig::new(1).with_momentum(1.0).init(&device))?;
    ///     let value = accelerator.rank() as f64 * 4.0;
    ///     model.forward(Tensor::<2>::full([3, 1], value, &device));
    ///     accelerator.sync_buffers(&model)?;
    ///     Ok((model.running_mean.value().into_scalar::<f64>(), model.running_var.value().into_scalar::<f64>()))
    /// })?;
    /// assert_eq!(means, [(2.0, 4.0), (2.0, 4.0)]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost, or has another model.
    #[track_caller]
    pub fn sync_buffers<M: Module>(&self, model: &M) -> Result<()> {
        sync_buffers(&self.shared.context, model)
    }

    /// The model for evaluation, as Burn's `model.valid()`, with the running statistics of all ranks; see
    /// [`sync_buffers`](Self::sync_buffers). The parameters of a prepared model are
    /// [compared](Self::check_replicas) before. Every rank calls it.
    ///
    /// # Errors
    ///
    /// The errors of [`sync_buffers`](Self::sync_buffers); [`Error::is_drift`](crate::Error::is_drift) on every rank if
    /// the parameters are no longer the same on all of them; [`Error::is_misuse`](crate::Error::is_misuse) on every
    /// rank in the middle of a round of [local training](crate::local), where each rank has a model of its own, and
    /// what they measure together is that of none: evaluate when it was averaged, or this rank's replica with Burn's
    /// `model.valid()`.
    #[track_caller]
    pub fn valid<M: Module>(&self, model: &M) -> Result<M> {
        let (reduction, tracking) = (&self.shared.reduction, &self.shared.tracking);
        replicas::check_and_sync(reduction, tracking, "evaluate the model", model)?;
        Ok(model.valid())
    }
}
