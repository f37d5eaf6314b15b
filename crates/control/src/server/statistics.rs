//! The statistics of a window.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use serde::Deserialize;

use super::{Answer, Shared, ask};
use crate::api::{ErrorBody, StatisticsStatus};
use crate::error::{ControlError, ControlErrorKind};
use crate::statistics::Window;

/// The query of a request.
#[derive(Deserialize)]
pub(super) struct Asked {
    window: Option<String>,
}

/// What happened in a window that ends now: `now`, `5m` (the default), `1h`, `1d`, or `start`.
#[utoipa::path(get, path = "/v1/statistics", params(("window" = Option<String>, Query)),
    responses((status = 200, body = StatisticsStatus), (status = 400, body = ErrorBody),
    (status = 503, body = ErrorBody)))]
pub(super) async fn statistics(
    State(shared): State<Shared>,
    asked: Result<Query<Asked>, QueryRejection>,
) -> Answer<Json<StatisticsStatus>> {
    let Query(asked) = asked?;
    let window = window(asked.window.as_deref())?;
    ask(move || Ok(Json(shared.monitor.statistics(window)?))).await
}

/// The window of this name; the usual one without a name.
fn window(name: Option<&str>) -> Result<Window, ControlError> {
    let Some(name) = name else { return Ok(Window::default()) };
    Window::named(name).ok_or_else(|| {
        let what = format!("there is no window {name:?}");
        let names = Window::ALL.map(Window::name).join(", ");
        ControlError::new(ControlErrorKind::Invalid, what, format!("use one of {names}"))
    })
}
