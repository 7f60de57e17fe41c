use super::Accelerator;
use crate::core::device::BackendKind;

/// The kind of devices that a training runs on, by the names of Accelerate.
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
    /// A single rank.
    No,
    /// Several ranks that compute on CPUs.
    MultiCpu,
    /// Several ranks that compute on GPUs.
    MultiGpu,
}

impl Accelerator {
    /// Returns whether there are several ranks, and the kind of device on which they compute.
    pub fn distributed_type(&self) -> DistributedType {
        match self.backend_kind() {
            _ if self.world_size() == 1 => DistributedType::No,
            BackendKind::Flex | BackendKind::NdArray => DistributedType::MultiCpu,
            _ => DistributedType::MultiGpu,
        }
    }
}
