//! A thread that reads what lies on a device, so that the one that runs backward continues.

use core::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;

use burn::tensor::{Tensor, TensorData};

use crate::core::error::{Error, Kind, Result};
use crate::core::panic_text::panic_text;

/// Reads tensors in the order in which it is asked to. It ends with its last handle.
#[derive(Debug)]
pub(in crate::reduce) struct DeviceReader {
    requests: Sender<ReadRequest>,
}

#[derive(Debug)]
struct ReadRequest {
    tensor: Tensor<1>,
    answer: Sender<Answer>,
}

type Answer = core::result::Result<TensorData, String>;

/// A read from a device that is in progress.
pub(in crate::reduce) struct PendingRead {
    answer: Receiver<Answer>,
    received: Option<Answer>,
}

impl DeviceReader {
    /// Starts the thread.
    pub(in crate::reduce) fn start() -> Result<Self> {
        let (requests, asked) = channel::<ReadRequest>();
        let read = move || {
            for ReadRequest { tensor, answer } in asked {
                let read = catch_unwind(AssertUnwindSafe(|| tensor.into_data()));
                // Who gave up waiting hears nothing.
                let _ = answer.send(read.map_err(|panic| panic_text(&*panic).to_owned()));
            }
        };
        let builder = thread::Builder::new().name("accel-read".to_owned());
        match builder.spawn(read) {
            Ok(_) => Ok(Self { requests }),
            Err(error) => Err(Error::new(
                Kind::Device,
                "the thread that reads gradients from the device could not be started",
            )
            .with_source(error)),
        }
    }

    pub(in crate::reduce) fn read(&self, tensor: Tensor<1>) -> PendingRead {
        let (answer, receiver) = channel();
        // A thread that is gone has dropped the sender, which `wait` tells.
        let _ = self.requests.send(ReadRequest { tensor, answer });
        PendingRead {
            answer: receiver,
            received: None,
        }
    }
}

impl PendingRead {
    /// Returns `true` if [`wait`](Self::wait) returns at once.
    pub(in crate::reduce) fn is_ready(&mut self) -> bool {
        if self.received.is_none() {
            self.received = match self.answer.try_recv() {
                Ok(answer) => Some(answer),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => Some(Err("its thread ended".to_owned())),
            };
        }
        self.received.is_some()
    }

    /// The values, when they were received.
    pub(in crate::reduce) fn wait(mut self) -> Result<TensorData> {
        let answer = match self.received.take() {
            Some(answer) => answer,
            None => {
                let gone = |_| Err("its thread ended".to_owned());
                self.answer.recv().unwrap_or_else(gone)
            }
        };
        answer.map_err(|text| {
            Error::new(
                Kind::Device,
                format!("gradients could not be read from the device: {text}"),
            )
        })
    }
}

impl fmt::Debug for PendingRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingRead")
            .field("is_received", &self.received.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn tensors_are_read_in_their_order() {
        let reader = DeviceReader::start().unwrap();
        let tensor = |value: f32| Tensor::<1>::full([3], value, &Device::default());
        let readings: Vec<_> = (0..4).map(|at| reader.read(tensor(at as f32))).collect();
        for (at, mut reading) in readings.into_iter().enumerate() {
            // Once it is there, it stays.
            while !reading.is_ready() {
                thread::yield_now();
            }
            assert!(reading.is_ready());
            let data = reading.wait().unwrap();
            assert_eq!(data.as_slice::<f32>().unwrap(), [at as f32; 3]);
        }
    }

    #[test]
    fn a_reading_whose_thread_is_gone_is_an_error() {
        let (_, answer) = channel();
        let mut reading = PendingRead {
            answer,
            received: None,
        };
        assert!(reading.is_ready());
        assert!(reading.wait().unwrap_err().is_device());
    }
}
