"""All sentences of the narration in English. ``{n:token/tokens}`` is a number with its word (``acts.Count``)."""

from collections.abc import Mapping
from types import MappingProxyType

WORDS: Mapping[str, str] = MappingProxyType(
    {
        # titles
        "title_tokens": "The text becomes tokens",
        "title_step": "Step {step}",
        "title_totals": "The whole run in numbers",
        "title_reset": "A step was broken off",
        "head_scheduler": "The scheduler: {running} running, {waiting} waiting",
        "head_blocks": "The memory",
        "head_draw": "The next token",
        # how things are listed
        "comma": ", ",
        "and": " and ",
        "more": "{count} more",
        # tokens
        "lesson_tokens": (
            "A language model does not read letters. A tokenizer cuts the text into tokens, which are pieces of "
            "words that the model has a number for. In the pieces below, “·” is a blank and “↵” is the end of a line."
        ),
        "lesson_chat": (
            "You asked for a chat, so the model's chat template was put around your text. It marks with special "
            "tokens who says what, in the way the model saw it in training."
        ),
        "prompt": "Request {name} has a prompt of {tokens:token/tokens}:",
        "continuations": (
            "You asked for {count:continuation/continuations}. The engine treats each as a sequence of its own, "
            "which are called {name}.1, {name}.2 and so on. The prompt is computed only once for all of them."
        ),
        # the scheduler
        "lesson_scheduler": (
            "The engine works in steps. In each step the model computes some tokens of some requests, all together: "
            "that is faster than one request after the other, because the model's weights are read from memory only "
            "once for all of them. Before a step, the scheduler decides who takes part. Requests that run already go "
            "first. Then come those that wait, in the order in which they came (or by priority, if you gave any)."
        ),
        "lesson_prefill": (
            "A new request begins with its prompt. The model computes all tokens of the prompt at once and keeps "
            "what it learned about each of them. This is called the prefill."
        ),
        "lesson_decode": (
            "After the prompt, a request gets one new token in each step. For that, the model computes only the last "
            "token: it looks up what it kept about the earlier ones. This is called decoding."
        ),
        "lesson_share": (
            "Other requests are decoding right now, and each of them waits for the whole step to end. A long prompt "
            "would make them stall. So the scheduler lets prompts have only a share of the step beside them."
        ),
        "lesson_drafts": (
            "This run guesses ahead (speculative decoding). A cheap method guesses the next tokens, and the model "
            "checks all guesses in one step. That takes hardly longer than computing one token, so every right guess "
            "saves a step. A wrong guess costs nothing but the check: the text is the same as without guessing."
        ),
        "admitted": (
            "Request {name} comes in from the queue. The step computes {tokens:token/tokens} of its {known} ({where})."
        ),
        "admitted_whole": "Request {name} comes in from the queue. The step computes all of its {known:token/tokens}.",
        "admitted_cached": (
            "Request {name} comes in from the queue with {known:token/tokens}. The first {cached} need no work, "
            "because what the model knows about them is already in memory. The step computes {tokens:token/tokens} ("
            "{where})."
        ),
        "returns": (
            "Request {name} comes back after it had lost its memory. Of the {known:token/tokens} that it has by now, "
            "{cached} {cached:~is/are} still in memory. The step computes {tokens:token/tokens} ({where}) again."
        ),
        "at_one": "position {first}",
        "at_many": "positions {first} to {last}",
        "admitted_why": (
            "{count:~It/They} could come in because three things were there: a place among the requests that run ("
            "{running} of {seats} are taken now), room in the step, and free blocks of memory ({free} are left)."
        ),
        "continues": "Request {name} goes on with its prompt: the step computes {tokens:token/tokens} ({where}).",
        "catches_up": (
            "Request {name} got several tokens at once, so the step computes {tokens:token/tokens} together ({where})."
        ),
        "forks": (
            "Sequence {name} continues the same prompt. It computes nothing: it takes its first token from the "
            "result of its sibling, and it shares the sibling's memory."
        ),
        "chunk_share": (
            "No more of request {name}, because prompts may have {share:token/tokens} of a step beside those that "
            "decode. {left:token is/tokens are} left for later steps."
        ),
        "chunk_budget": (
            "No more of request {name}, because a step holds {budget:token/tokens} at most. "
            "{left:token is/tokens are} left for later steps."
        ),
        "chunk_last": "With that, all of request {name} is computed, and it gets its first token.",
        "more_prefills": "So do {count:more request/more requests}, with {tokens:token/tokens} together.",
        "decodes": (
            "Decoding: {count:~request/requests} {names}. One token of each goes in, and one new token comes out."
        ),
        "verifies": (
            "Request {name} has {drafts:guess/guesses}. They are computed together with its last token (position "
            "{position})."
        ),
        "verifies_none": (
            "No guess was found for request {name} this time. Its last token (position {position}) is computed, and "
            "the places for guesses stay empty."
        ),
        "more_verified": "So do {count:more request/more requests}.",
        "step_tokens": "The step computes {tokens:token/tokens} in all. There is room for {budget}.",
        "wait_queue": "{count:request waits/requests wait}: they came too late for this step.",
        "wait_seats": (
            "{count:request waits/requests wait}: {running:request runs/requests run} already, and that is the limit "
            "(max_num_seqs)."
        ),
        "wait_tokens": (
            "{count:request waits/requests wait}: the tokens that this step may take of prompts are spent "
            "(max_num_batched_tokens is {budget})."
        ),
        "wait_blocks": (
            "{count:request waits/requests wait}: only {free:block is/blocks are} free, and that is not enough for "
            "the next one and a reserve for those that run."
        ),
        "wait_in_flight": (
            "{count:request waits/requests wait}: the last token of the first one is still being computed."
        ),
        "wait_preemption": (
            "{count:request waits/requests wait}: a step that has just taken memory away from a request lets nobody "
            "in whose turn was not before that one's."
        ),
        "lesson_preempted": (
            "The memory is full, and a request that runs needs one more block, or one of higher priority waits for "
            "a place. Then the request that came last, of the lowest priority, has to give its place and its blocks "
            "back and to wait again. This is called preemption. No token of its text is lost: only the keys and values "
            "of its tokens have to be found, or computed, again."
        ),
        "preempted": (
            "Preempted: {names}, for others that need some of the {blocks:block/blocks} first. What is not found in "
            "the cache later is computed again."
        ),
        "preempted_host": (
            "Preempted: {names}, for others that need some of the {blocks:block/blocks} first. Full blocks are kept "
            "in the host's memory and can be copied back later."
        ),
        # blocks
        "lesson_blocks": (
            "What the model keeps of a token is its key and its value, two rows of numbers in each layer. They lie "
            "in blocks of {size:token/tokens}. Each sequence has a block table, which says in which block its tokens "
            "lie. The blocks need not be neighbours, so nobody has to reserve memory for text that may never come. "
            "This idea is called paged attention."
        ),
        "lesson_found": (
            "Requests often begin with the same words. A full block is known by its contents, that is by all tokens "
            "up to its end. So a request that begins in the same way takes the block as it is. This is called prefix "
            "caching."
        ),
        "lesson_shared": (
            "Several sequences point to the same block. Nobody writes into a full block any more, so sharing is safe."
        ),
        "lesson_copied": (
            "A block that is only partly full can be shared too, until somebody wants to write into it. At that "
            "moment the writer gets a copy of its own. This is called copy-on-write."
        ),
        "lesson_evicted": (
            "A free block keeps its old contents until it is needed, in case somebody asks for them. To give it to "
            "somebody else means to forget the contents. The block that has been free for longest goes first."
        ),
        "lesson_stored": (
            "This engine also has memory of the host (the computer around the GPU). Full blocks are copied there "
            "beside the steps, so that they are not lost when the GPU's memory is needed for others."
        ),
        "lesson_loaded": "To copy a block back from the host takes less time than to compute it once more.",
        "allocated": "{blocks:free block goes/free blocks go} to {requests:~request/requests} {names}.",
        "found": (
            "Request {name} finds {blocks:block/blocks} in the prefix cache: {tokens:token/tokens} that nobody has "
            "to compute."
        ),
        "found_of_sibling": (
            "Sequence {name} takes {blocks:block/blocks} ({tokens:token/tokens}) of its sibling's, which nobody has "
            "to compute again."
        ),
        "shared": (
            "{blocks:block belongs/blocks belong} to more than one sequence. That saves {saved:block/blocks} of memory."
        ),
        "copied": "Block {source} is copied to block {target}, so that {name} can write there.",
        "evicted": "The contents of {blocks:block/blocks} are forgotten, because others need the room.",
        "stored": "{blocks:block is/blocks are} copied to the host's memory: {ids}.",
        "loaded": "{blocks:block comes/blocks come} back from the host's memory: {ids}.",
        "mark_old": "{mark} as before",
        "mark_new": "{mark} new",
        "mark_cached": "{mark} found in the cache",
        "mark_shared": "{mark} shared",
        "mark_copied": "{mark} a copy",
        "mark_loaded": "{mark} from the host",
        "slots": "{filled} of {room} places filled",
        "more_tables": "{count:more block table is/more block tables are} not shown.",
        "pool": (
            "{used} of {blocks:block/blocks} {used:~is/are} in use now. The contents of {cached} can be found again "
            "by the prefix cache."
        ),
        "pool_plain": "{used} of {blocks:block/blocks} {used:~is/are} in use now.",
        # draws
        "lesson_draw": (
            "For each of the {vocab:token/tokens} of its vocabulary, the model gives a score (a logit) that says how "
            "well the token fits next. The softmax function turns the scores into probabilities, which add up to "
            "100%. The bars show the likeliest candidates. On the right is the probability with which each could be "
            "drawn in the end."
        ),
        "candidates": "Request {name}: by the model alone, {piece} is the likeliest next token, with {share}.",
        "column_token": "token",
        "column_model": "the model",
        "column_final": "could be drawn",
        "column_drawn": "◄ next token",
        "dropped_penalties": "out: penalties",
        "dropped_bans": "out: banned",
        "dropped_grammar": "out: grammar",
        "dropped_temperature": "out: temperature",
        "dropped_min_p": "out: min-p",
        "dropped_top_k": "out: top-k",
        "dropped_top_p": "out: top-p",
        "dropped_greedy": "not the highest",
        "lesson_penalties": (
            "Penalties lower the scores of tokens that the text has already, so that it repeats itself less."
        ),
        "lesson_grammar": (
            "You said what the output must look like. After each token the grammar says which tokens may follow, and "
            "all others get the probability 0. So the output fits for certain."
        ),
        "lesson_temperature": (
            "All scores are divided by the temperature. Below 1, likely tokens become likelier still; above 1, "
            "unlikely tokens get a better chance."
        ),
        "moved": "{piece} went from {was} to {now}",
        "stayed": "{piece} stays at {now}",
        "stage_penalties": "Penalties changed the scores of {changed:token/tokens}: {moved}.",
        "stage_bans": "Bans and biases leave {left} of {before:token/tokens}: {moved}.",
        "stage_grammar": "The grammar allows {left} of {before:token/tokens} here: {moved}.",
        "stage_grammar_one": (
            "The grammar allows only one token here: {moved}. (Without --narrate the engine may write such a token "
            "down without asking the model. That is called jump-forward.)"
        ),
        "stage_thought_budget": (
            "The model has thought long enough (thinking_token_budget): {left:token is/tokens are} allowed, {moved}."
        ),
        "stage_temperature_low": "Temperature {value} sharpens the choice: {moved}.",
        "stage_temperature_high": "Temperature {value} flattens the choice: {moved}.",
        "stage_min_p": (
            "min-p {value} drops {gone:token/tokens} that {gone:~is/are} less likely than {value} times the "
            "likeliest. {left} {left:~stays/stay}: {moved}."
        ),
        "stage_top_k": (
            "top-k {value} keeps the {value} likeliest: {gone:token goes/tokens go}, {left} {left:~stays/stay}. "
            "{moved}."
        ),
        "stage_top_p": (
            "top-p {value} keeps the likeliest tokens until they reach {value} together: "
            "{gone:token goes/tokens go}, {left} {left:~stays/stay}. {moved}."
        ),
        "drawn": (
            "The engine draws one of the {left:token/tokens} that are left, by chance and by these probabilities. "
            "Request {name} gets {piece}, which had {share}."
        ),
        "drawn_only": "Only one token is left, so there is nothing to draw. Request {name} gets {piece}.",
        "drawn_greedy": (
            "The temperature is 0, so there is no chance in it: the highest score wins. Request {name} gets {piece}."
        ),
        "lesson_logprobs": (
            "Where guesses are checked, the narrator cannot look at all scores without stopping the guessing. So the "
            "bars show the model's own probabilities, before temperature and other rules."
        ),
        "drawn_logprobs": "Request {name} gets {piece}, to which the model gave {share}.",
        "got": "Request {name} gets {text}.",
        "got_more": "The others got: {got}.",
        "lesson_no_draw": (
            "A token can be drawn only when the whole prompt has been computed: the last token's result says what "
            "comes next."
        ),
        "no_draw": "No request has come to the end of its prompt, so this step brings no new token.",
        "verdict_none": (
            "None of the {drafts:guess/guesses} for request {name} was right. The model's own token is used: {own}."
        ),
        "verdict_some": (
            "Of the {drafts:guess/guesses} for request {name}, {accepted} {accepted:~was/were} right: {right}. The "
            "next one was wrong, and with it the rest is dropped. The model's own token is used there: {own}."
        ),
        "verdict_all": (
            "All {drafts:guess/guesses} for request {name} {drafts:~was/were} right: {right}. The model adds one "
            "more token of its own: {own}."
        ),
        "verdict_ended": (
            "Of the {drafts:guess/guesses} for request {name}, {accepted} {accepted:~was/were} right, and among them "
            "the output ends: {right}."
        ),
        "lesson_forced": (
            "Where a grammar leaves only one continuation, there is nothing to draw. The engine writes these tokens "
            "down at once and computes them together in the next step. This is called jump-forward."
        ),
        "forced": "The grammar forces {tokens:token/tokens} of request {name}: {text}.",
        # later steps
        "lesson_brief": (
            "From here on each step gets one line, and what is new gets a sentence. Candidates and block tables are "
            "left out."
        ),
        "brief": "Step {step}: {tokens:token/tokens} of {requests:request/requests} computed; new: {got}",
        "brief_none": "Step {step}: {tokens:token/tokens} of {requests:request/requests} computed; no new token yet",
        # ends
        "end_stop": (
            "Request {name} has ended after {tokens:token/tokens}: the model said that the text is complete, or a "
            "stop text came up."
        ),
        "end_length": "Request {name} has ended after {tokens:token/tokens}: it may not become longer.",
        "end_repetition": "Request {name} has ended after {tokens:token/tokens}: it repeated itself.",
        "end_abort": "Request {name} was stopped from outside after {tokens:token/tokens}.",
        "end_error": "Request {name} has ended with an error after {tokens:token/tokens}.",
        "end_cached": "The cache spared request {name} the work for {cached:token/tokens} of its prompt.",
        "end_preempted": "It was preempted {times:time/times}.",
        "end_why": "The error: {error}",
        "reset": "All requests end, and the memory is empty again. The reason: {reason}",
        # totals
        "total_requests": (
            "{requests:request/requests} with {prompt_tokens:prompt token/prompt tokens} got "
            "{generated_tokens:new token/new tokens}."
        ),
        "total_steps": "That took {steps:step/steps}, in which {computed_tokens:token/tokens} went through the model.",
        "total_vain": (
            "{count:step was/steps were} planned ahead for requests that had ended by then; nobody needed the results."
        ),
        "total_cached": "{cached_tokens} of these prompt tokens came from the prefix cache and were not computed.",
        "total_blocks": "{copied_blocks:block was/blocks were} copied on write.",
        "total_evicted": "The contents of {evicted_blocks:block/blocks} were forgotten for others.",
        "total_preemptions": "{preemptions:time/times} a sequence was preempted.",
        "total_host": (
            "{stored_blocks:block/blocks} went to the host's memory, and {loaded_blocks} came back from there."
        ),
        "total_drafts": (
            "{draft_tokens:token was/tokens were} guessed, and {accepted_tokens} of them {accepted_tokens:~was/were} "
            "right."
        ),
        "total_forced": "{forced_tokens:token was/tokens were} forced by a grammar and not drawn.",
        "left_prompts": "Left out: the tokens of {count:prompt/prompts}.",
        "left_steps": "Left out: block tables and reasons of {count:step/steps}.",
        "left_draws": "Left out: the candidates of {count:token/tokens}.",
        "left_news": "Left out: {count:sentence/sentences} about things that had been told before.",
        "left_ends": "Left out: how {count:sequence/sequences} ended.",
    }
)
