//! The events: list, stream, acknowledgement.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{Path as Segment, Query, State};
use axum::http::HeaderMap;
use axum::response::sse::{Event as Message, KeepAlive, Sse};
use futures_util::Stream;
use futures_util::stream::unfold;
use serde::Deserialize;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{OwnedSemaphorePermit, broadcast, watch};

use super::{Answer, Shared, ask};
use crate::api::{Acknowledgement, ErrorBody, Event, EventList};
use crate::error::{ControlError, ControlErrorKind};
use crate::events::{EventLog, Update};

/// How often a stream without news says that it is alive.
const ALIVE: Duration = Duration::from_secs(15);

/// The query of a request.
#[derive(Deserialize)]
pub(super) struct Asked {
    after: Option<u64>,
}

/// The remembered events, oldest first; with `after`, those with a higher number.
#[utoipa::path(get, path = "/v1/events", params(("after" = Option<u64>, Query)),
    responses((status = 200, body = EventList), (status = 400, body = ErrorBody)))]
pub(super) async fn events(
    State(shared): State<Shared>,
    asked: Result<Query<Asked>, QueryRejection>,
) -> Answer<Json<EventList>> {
    let Query(asked) = asked?;
    let events = shared.monitor.events().list(asked.after.unwrap_or(0));
    Ok(Json(EventList { events }))
}

/// Acknowledges an event, in the name of a person or a program. Others see who it was.
#[utoipa::path(post, path = "/v1/events/{id}/ack", params(("id" = u64, Path)),
    request_body = Acknowledgement, responses((status = 200, body = Event),
    (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
    (status = 409, body = ErrorBody)))]
pub(super) async fn acknowledge(
    State(shared): State<Shared>,
    Segment(id): Segment<String>,
    body: Result<Json<Acknowledgement>, JsonRejection>,
) -> Answer<Json<Event>> {
    let Json(Acknowledgement { by }) = body?;
    let id = id.parse().map_err(|_| {
        let what = format!("{id:?} is not the number of an event");
        ControlError::new(ControlErrorKind::Invalid, what, "list them with GET /v1/events")
    })?;
    ask(move || Ok(Json(shared.monitor.events().acknowledge(id, &by)?))).await
}

/// The events as a stream (server-sent events): `event` with a number as its id, and
/// `acknowledged`. It begins after the number in `Last-Event-ID` or `after`; without one, with all
/// that are remembered.
#[utoipa::path(get, path = "/v1/events/stream", params(("after" = Option<u64>, Query)),
    responses((status = 200, body = String, content_type = "text/event-stream"),
    (status = 400, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub(super) async fn stream(
    State(shared): State<Shared>,
    headers: HeaderMap,
    asked: Result<Query<Asked>, QueryRejection>,
) -> Answer<Sse<impl Stream<Item = Result<Message, Infallible>>>> {
    let Query(asked) = asked?;
    Ok(followed(&shared, start(&headers, &asked), false)?)
}

/// As `/v1/events/stream`, and each second an `update` with the status, the statistics of the last
/// second, and the drains.
#[utoipa::path(get, path = "/v1/stream", params(("after" = Option<u64>, Query)),
    responses((status = 200, body = String, content_type = "text/event-stream"),
    (status = 400, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub(super) async fn everything(
    State(shared): State<Shared>,
    headers: HeaderMap,
    asked: Result<Query<Asked>, QueryRejection>,
) -> Answer<Sse<impl Stream<Item = Result<Message, Infallible>>>> {
    let Query(asked) = asked?;
    Ok(followed(&shared, start(&headers, &asked), true)?)
}

/// The number after which a stream begins.
fn start(headers: &HeaderMap, asked: &Asked) -> u64 {
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok()?.parse().ok());
    last.or(asked.after).unwrap_or(0)
}

/// Somebody who follows the events. Holds at most the remembered events and one update.
struct Following {
    log: Arc<EventLog>,
    /// Number of the last event sent.
    last: u64,
    backlog: VecDeque<Event>,
    updates: broadcast::Receiver<Update>,
    /// For the page: what the monitor has seen.
    seen: Option<watch::Receiver<Arc<str>>>,
    closing: watch::Receiver<bool>,
    _place: OwnedSemaphorePermit,
}

fn followed(
    shared: &Shared,
    last: u64,
    with_updates: bool,
) -> Result<Sse<impl Stream<Item = Result<Message, Infallible>> + use<>>, ControlError> {
    let place = Arc::clone(&shared.streams).try_acquire_owned().map_err(|_| {
        let kind = ControlErrorKind::Unavailable;
        ControlError::new(kind, "too many streams are open", "close one, or poll /v1/events")
    })?;
    let monitor = &shared.monitor;
    let log = Arc::clone(monitor.events());
    // First the receiver: what happens now is in the list, or comes later, or both.
    let updates = log.follow();
    let (last, backlog) = log.list_from(last);
    let following = Following {
        backlog: backlog.into(),
        log,
        last,
        updates,
        seen: with_updates.then(|| monitor.seen()),
        closing: monitor.closing(),
        _place: place,
    };
    let messages = unfold(following, |mut following| async move {
        let message = following.next().await?;
        Some((Ok(message), following))
    });
    Ok(Sse::new(messages).keep_alive(KeepAlive::new().interval(ALIVE)))
}

impl Following {
    /// The next message; `None` when the server ends.
    async fn next(&mut self) -> Option<Message> {
        loop {
            if let Some(event) = self.backlog.pop_front() {
                self.last = event.id;
                let id = event.id.to_string();
                return Message::default().event("event").id(id).json_data(event).ok();
            }
            let seen = async {
                match &mut self.seen {
                    Some(seen) => {
                        seen.changed().await.ok().map(|()| seen.borrow_and_update().clone())
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                _ = self.closing.wait_for(|closing| *closing) => return None,
                update = self.updates.recv() => match update {
                    Ok(Update::Event(event)) => {
                        // It may have been in the list already.
                        self.backlog.extend((event.id > self.last).then_some(event));
                    }
                    Ok(Update::Acknowledged(who)) => {
                        return Message::default().event("acknowledged").json_data(who).ok();
                    }
                    Err(RecvError::Lagged(_)) => self.backlog = self.log.list(self.last).into(),
                    Err(RecvError::Closed) => return None,
                },
                text = seen => return Some(Message::default().event("update").data(&*text?)),
            }
        }
    }
}
