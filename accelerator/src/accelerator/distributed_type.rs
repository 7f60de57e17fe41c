use super::Accelerator;
use crate::core::device::BackendKind;

/// On what a training runs, by the names of Accelerate.
///
/// ```
/// use accelerator::DistributedType;
///
/// let seen = accelerator::launch(2, |accelerator| {
///     Ok(match accelerator.distributed_type() {
///         DistributedType::No => "alone",
///         DistributedType::MultiCpu => "on CPUs",
///         DistributedType::MultiGpu => "on GPUs",
///         _ => "?",
///     })
/// })?;
/// assert_eq!(seen, ["on CPUs"; 2]);
/// # Ok::<(), accelerator::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum DistributedType {
    /// One rank alone.
    No,
    /// Several ranks that compute on CPUs.
    MultiCpu,
    /// Several ranks that compute on GPUs.
    MultiGpu,
}

impl Accelerator {
    /// Whether there are several ranks, and on which kind of device they compute.
    ///
    /// ```
    /// # use accelerator::DistributedType;
    /// let accelerator = accelerator::Accelerator::new()?;
    /// assert_eq!(accelerator.distributed_type(), DistributedType::No);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn distributed_type(&self) -> DistributedType {
        match self.backend_kind() {
            _ if self.world_size() == 1 => DistributedType::No,
            BackendKind::Flex | BackendKind::NdArray => DistributedType::MultiCpu,
            _ => DistributedType::MultiGpu,
        }
    }
}
