//! Training by arguments instead of a loop.
mod arguments;
mod callback;
mod console;
mod flow;
mod loss;
mod operator;
mod rates;
mod state;
mod trainer;
mod words;

pub use self::arguments::{
    IntervalStrategy, OptimizerName, ReportTo, ResumeFrom, SaveStrategy, TrainSamplingStrategy,
    TrainingArguments,
};
pub use self::callback::{CallbackContext, TrainerCallback, TrainerControl};
pub use self::loss::{Inputs, IntoLossOutput, LossOutput};
pub use self::operator::{
    BatchOf, CriterionOutputs, EpochInfo, Meter, OperatorTrainer, OperatorWorker, Registered,
    RegisteredData, RegisteredModel, RegisteredModels, Setup, StepInfo, TrainBatches,
    TrainingOperator,
};
pub use self::rates::{LrSchedulerKwargs, LrSchedulerType};
pub use self::state::{Figures, LogEntry, TrainerState};
pub use self::trainer::{PredictionOutput, TrainOutput, Trainer, TrainerBuilder};
