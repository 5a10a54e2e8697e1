"""All sentences of the narration in Chinese; the keys and placeholders are those of ``words_en``."""

from collections.abc import Mapping
from types import MappingProxyType

WORDS: Mapping[str, str] = MappingProxyType(
    {
        # titles
        "title_tokens": "文本变成词元",
        "title_step": "第 {step} 步",
        "title_totals": "整个过程的数字",
        "title_reset": "有一步中断了",
        "head_scheduler": "调度器：{running} 个在运行，{waiting} 个在排队",
        "head_blocks": "缓存里的块",
        "head_draw": "下一个词元",
        # how things are listed
        "comma": "、",
        "and": "和",
        "more": "另外 {count} 个",
        # tokens
        "lesson_tokens": (
            "语言模型不认字母，也不认汉字。分词器先把文本切成一个个“词元”（token），每个词元在模型里都有一个编号。下"
            "面用“·”表示空格，用“↵”表示换行。"
        ),
        "lesson_chat": (
            "您用的是对话模式，所以文本外面套上了模型的对话模板。模板用特殊词元标明每句话是谁说的，和训练时的格式一样。"
        ),
        "prompt": "请求 {name} 的提示词有 {tokens} 个词元：",
        "continuations": (
            "您要 {count} 个不同的续写。引擎把每个续写当作一条单独的序列，分别叫 {name}.1、{name}.2，依此类推。提示词"
            "只需要计算一次，大家共用。"
        ),
        # the scheduler
        "lesson_scheduler": (
            "引擎一步一步地工作。每一步里，模型同时计算若干请求的若干词元。这比逐个处理请求快得多，因为模型的权重只需"
            "要从内存里读一遍。每一步开始之前，由调度器决定谁参加：先照顾正在运行的请求，再按先来后到（或者按您给的优"
            "先级）放排队的请求进来。"
        ),
        "lesson_prefill": (
            "新来的请求先处理提示词：模型一次算完提示词的词元，并把每个词元的计算结果存下来。这个阶段叫“预填充”（"
            "prefill）。"
        ),
        "lesson_decode": (
            "提示词算完之后，请求每一步得到一个新词元。这时模型只需要计算最后一个词元，前面的内容直接查之前存下的结果。"
            "这个阶段叫“解码”（decode）。"
        ),
        "lesson_share": (
            "现在还有别的请求正在解码，它们都要等这一步整个结束。如果一下子塞进很长的提示词，它们就会卡住。所以调度器"
            "只把这一步的一部分名额留给提示词。"
        ),
        "lesson_drafts": (
            "这次运行会提前猜测（推测解码）：先用便宜的办法猜出后面几个词元，再让模型在一步里全部核对。核对几个词元和"
            "计算一个词元花的时间差不多，所以每猜对一个就省下一步。猜错了也不要紧，最后的文本和不猜时完全一样。"
        ),
        "admitted": "请求 {name} 从队列里进来，共有 {known} 个词元，这一步计算其中 {tokens} 个（{where}）。",
        "admitted_whole": "请求 {name} 从队列里进来，这一步把它的 {known} 个词元全部算完。",
        "admitted_cached": (
            "请求 {name} 从队列里进来，共有 {known} 个词元。前 {cached} 个不用再算，结果已经在缓存里。这一步计算 "
            "{tokens} 个（{where}）。"
        ),
        "returns": (
            "请求 {name} 之前被收走了块，现在回来了。它一共有 {known} 个词元，其中 {cached} 个的结果还在。这一步重新"
            "计算 {tokens} 个（{where}）。"
        ),
        "at_one": "位置 {first}",
        "at_many": "位置 {first} 到 {last}",
        "admitted_why": (
            "{count} 个请求能进来，是因为三样都齐了：运行名额还有空（{seats} 个名额现在占了 {running} 个），这一步还"
            "装得下，空闲块也够用（还剩 {free} 个）。"
        ),
        "continues": "请求 {name} 接着算提示词：这一步计算 {tokens} 个词元（{where}）。",
        "catches_up": "请求 {name} 一次得到了好几个词元，这一步把 {tokens} 个一起算（{where}）。",
        "forks": "序列 {name} 续写同一个提示词。它什么都不用算：第一个词元直接从同组序列的结果里抽取，块也和它们共用。",
        "chunk_share": (
            "请求 {name} 这一步只算这么多，因为有别人在解码，提示词最多只能占 {share} 个词元。剩下 {left} 个留到后面。"
        ),
        "chunk_budget": "请求 {name} 这一步只算这么多，因为一步最多容纳 {budget} 个词元。剩下 {left} 个留到后面。",
        "chunk_last": "这样请求 {name} 就全部算完了，马上得到它的第一个词元。",
        "more_prefills": "还有 {count} 个请求也是这样，一共 {tokens} 个词元。",
        "decodes": "正在解码的请求有 {count} 个（{names}），每个放进一个词元，得到一个新词元。",
        "verifies": "请求 {name} 带着 {drafts} 个猜测，和它的最后一个词元（位置 {position}）一起计算。",
        "verifies_none": (
            "这次没有给请求 {name} 找到猜测，只计算它的最后一个词元（位置 {position}），留给猜测的位置空着。"
        ),
        "more_verified": "还有 {count} 个请求也是这样。",
        "step_tokens": "这一步总共计算 {tokens} 个词元，上限是 {budget} 个。",
        "wait_queue": "还有 {count} 个请求在等，它们来得太晚，没赶上这一步。",
        "wait_seats": "还有 {count} 个请求在等，因为已经有 {running} 个在运行，达到了上限（max_num_seqs）。",
        "wait_tokens": (
            "还有 {count} 个请求在等，因为这一步留给提示词的名额已经用完（max_num_batched_tokens 是 {budget}）。"
        ),
        "wait_blocks": (
            "还有 {count} 个请求在等，因为只剩 {free} 个空闲块，不够下一个请求用，还得给正在运行的请求留一点余量。"
        ),
        "wait_in_flight": "还有 {count} 个请求在等，因为排在最前面的那个，它的上一个词元还没有算出来。",
        "wait_preemption": (
            "还有 {count} 个请求在等，因为这一步刚刚从别的请求那里收走了块，就不再放排在那些请求后面的进来。"
        ),
        "lesson_preempted": (
            "块用完了，而正在运行的请求还需要一个；或者有优先级更高的请求在等位置。这时优先级最低、最晚来的请求要把自"
            "己的位置和块交出来，重新排队，这叫“抢占”。它的文字一个也不会丢，只是这些词元的计算结果以后要重新得到。"
        ),
        "preempted": (
            "被抢占的有：{names}。总共 {blocks} 个块，要先给排在前面的请求用。以后在缓存里找不到的部分要重新计算。"
        ),
        "preempted_host": (
            "被抢占的有：{names}。总共 {blocks} 个块，要先给排在前面的请求用。写满的块保存在主机内存里，以后可以拷贝回"
            "来。"
        ),
        # blocks
        "lesson_blocks": (
            "模型为每个词元保存的是它的“键”和“值”，也就是每一层里的两行数字。它们放在块里，每块能放 {size} 个词元。每"
            "条序列有一张块表，记着自己的词元在哪些块里。这些块不必相邻，所以不用为还没写出来的文字预留空间。这种做法"
            "叫“分页注意力”（PagedAttention）。"
        ),
        "lesson_found": (
            "很多请求的开头是一样的。写满的块可以按内容查找，也就是按从开头到这一块末尾的全部词元来查。开头相同的请求"
            "直接拿来用就行，这叫“前缀缓存”。"
        ),
        "lesson_shared": "几条序列指向同一个块。写满的块不会再有人改动，所以共用是安全的。",
        "lesson_copied": "没写满的块也可以共用，直到有人要往里写。这时写的一方会得到自己的一份拷贝，这叫“写时复制”。",
        "lesson_evicted": (
            "空闲的块会先留着旧内容，说不定还有人要用。把块交给别人，就等于忘掉里面的内容。空闲最久的块最先被拿走。"
        ),
        "lesson_stored": (
            "这个引擎还能使用主机内存（GPU 之外的普通内存）。写满的块会在计算的同时拷贝过去，这样块给了别人，内容也不"
            "会丢。"
        ),
        "lesson_loaded": "把一个块从主机内存拷贝回来，比重新计算要快。",
        "allocated": "分出 {blocks} 个空闲块，分给 {requests} 个请求（{names}）。",
        "found": "请求 {name} 在前缀缓存里找到 {blocks} 个块，这 {tokens} 个词元不用再算了。",
        "found_of_sibling": "序列 {name} 直接用同组序列的 {blocks} 个块，这 {tokens} 个词元不用再算了。",
        "shared": "有 {blocks} 个块同时属于多条序列，省下了 {saved} 个块的空间。",
        "copied": "块 {source} 被拷贝到块 {target}，这样 {name} 就可以往里写了。",
        "evicted": "有 {blocks} 个块的内容被忘掉了，因为别人要用这些空间。",
        "stored": "有 {blocks} 个块拷贝到主机内存：{ids}。",
        "loaded": "有 {blocks} 个块从主机内存拷贝回来：{ids}。",
        "mark_old": "{mark} 原有",
        "mark_new": "{mark} 新分的",
        "mark_cached": "{mark} 缓存里找到的",
        "mark_shared": "{mark} 共用的",
        "mark_copied": "{mark} 拷贝的",
        "mark_loaded": "{mark} 从主机内存回来的",
        "slots": "{room} 个位置用了 {filled} 个",
        "more_tables": "另外 {count} 张块表没有列出。",
        "pool": "现在 {blocks} 个块中有 {used} 个在使用。前缀缓存能按内容找到 {cached} 个块，空闲的也算在内。",
        "pool_plain": "现在 {blocks} 个块中有 {used} 个在使用。",
        # draws
        "lesson_draw": (
            "词表里有 {vocab} 个词元，模型给每一个打一个分（logit），表示它接在后面有多合适。softmax 函数把分数变成概"
            "率，加起来正好是 100%。下面的条形是最可能的候选，右边是它最后能被抽中的概率。"
        ),
        "candidates": "请求 {name}：只看模型的话，最可能的下一个词元是 {piece}，概率 {share}。",
        "column_token": "词元",
        "column_model": "模型给的概率",
        "column_final": "抽中的概率",
        "column_drawn": "◄ 选中",
        "dropped_penalties": "出局：惩罚",
        "dropped_bans": "出局：被禁用",
        "dropped_grammar": "出局：语法",
        "dropped_temperature": "出局：温度",
        "dropped_min_p": "出局：min-p",
        "dropped_top_k": "出局：top-k",
        "dropped_top_p": "出局：top-p",
        "dropped_greedy": "不是最高分",
        "lesson_penalties": "“惩罚”会压低文中已经出现过的词元的分数，免得文本总是重复。",
        "lesson_grammar": (
            "您规定了输出的格式。每写出一个词元，语法就会说明后面可以接哪些词元，其余词元的概率都变成 0。所以输出一定"
            "合乎格式。"
        ),
        "lesson_temperature": (
            "所有分数都要除以“温度”。温度低于 1，可能的词元变得更可能；高于 1，不太可能的词元机会变大。"
        ),
        "moved": "{piece} 从 {was} 变成 {now}",
        "stayed": "{piece} 仍是 {now}",
        "stage_penalties": "惩罚改变了 {changed} 个词元的分数：{moved}。",
        "stage_bans": "经过禁用和偏置，{before} 个词元里剩下 {left} 个：{moved}。",
        "stage_grammar": "语法在这里允许 {before} 个词元中的 {left} 个：{moved}。",
        "stage_grammar_one": (
            "语法在这里只允许一个词元：{moved}。（不用 --narrate 时，引擎遇到这种词元可以不问模型，直接写下来，这叫“"
            "跳跃前进”。）"
        ),
        "stage_thought_budget": "模型想得够久了（thinking_token_budget），现在只允许 {left} 个词元：{moved}。",
        "stage_temperature_low": "温度 {value} 让选择更集中：{moved}。",
        "stage_temperature_high": "温度 {value} 让选择更分散：{moved}。",
        "stage_min_p": (
            "min-p {value} 去掉了 {gone} 个词元，它们的概率不到最可能那个的 {value} 倍。剩下 {left} 个：{moved}。"
        ),
        "stage_top_k": "top-k {value} 只留下最可能的 {value} 个，去掉 {gone} 个，剩下 {left} 个：{moved}。",
        "stage_top_p": (
            "top-p {value} 从最可能的开始留，直到概率之和达到 {value}，去掉 {gone} 个，剩下 {left} 个：{moved}。"
        ),
        "drawn": "引擎按这些概率，从剩下的 {left} 个词元里随机抽一个。请求 {name} 抽到 {piece}，它的概率是 {share}。",
        "drawn_only": "只剩一个词元，不用抽了。请求 {name} 得到 {piece}。",
        "drawn_greedy": "温度是 0，不靠运气，分数最高的直接当选。请求 {name} 得到 {piece}。",
        "lesson_logprobs": (
            "核对猜测的时候，解说员要看全部分数就得停掉猜测。所以这里的条形是模型本来的概率，还没有经过温度等规则。"
        ),
        "drawn_logprobs": "请求 {name} 得到 {piece}，模型给它的概率是 {share}。",
        "got": "请求 {name} 得到 {text}。",
        "got_more": "其余的得到：{got}。",
        "lesson_no_draw": "只有整个提示词都算完了才能抽取词元，因为接下来写什么要看最后一个词元的计算结果。",
        "no_draw": "还没有哪个请求算到提示词的末尾，所以这一步没有新词元。",
        "verdict_none": "给请求 {name} 猜的 {drafts} 个都不对，用模型自己的词元：{own}。",
        "verdict_some": (
            "给请求 {name} 猜了 {drafts} 个，前 {accepted} 个猜对了：{right}。下一个错了，后面的也跟着作废，那里用模"
            "型自己的词元：{own}。"
        ),
        "verdict_all": "给请求 {name} 猜的 {drafts} 个全对：{right}。模型自己再加一个：{own}。",
        "verdict_ended": "给请求 {name} 猜了 {drafts} 个，猜对 {accepted} 个，输出就在其中结束：{right}。",
        "lesson_forced": "语法只留下一种写法时，就没什么可抽的。引擎直接写下这些词元，下一步一起计算，这叫“跳跃前进”。",
        "forced": "语法替请求 {name} 定下了 {tokens} 个词元：{text}。",
        # later steps
        "lesson_brief": "从这里开始，每一步只用一行，有新鲜事再多说一句，不再列出候选和块表。",
        "brief": "第 {step} 步：计算 {requests} 个请求的 {tokens} 个词元；新词元：{got}",
        "brief_none": "第 {step} 步：计算 {requests} 个请求的 {tokens} 个词元；还没有新词元",
        # ends
        "end_stop": "请求 {name} 在 {tokens} 个词元之后结束：模型认为写完了，或者出现了停止文本。",
        "end_length": "请求 {name} 在 {tokens} 个词元之后结束：已经到了长度上限。",
        "end_repetition": "请求 {name} 在 {tokens} 个词元之后结束：它在不停地重复。",
        "end_abort": "请求 {name} 在 {tokens} 个词元之后被外部叫停。",
        "end_error": "请求 {name} 在 {tokens} 个词元之后因出错而结束。",
        "end_cached": "缓存替请求 {name} 省去了 {cached} 个提示词词元的计算。",
        "end_preempted": "它被抢占过 {times} 次。",
        "end_why": "出错的原因：{error}",
        "reset": "所有请求都结束，缓存也清空了。原因：{reason}",
        # totals
        "total_requests": "{requests} 个请求，提示词共 {prompt_tokens} 个词元，生成了 {generated_tokens} 个新词元。",
        "total_steps": "一共用了 {steps} 步，{computed_tokens} 个词元经过了模型。",
        "total_vain": "另有 {count} 步是提前安排的，算完时请求已经结束，结果没有用上。",
        "total_cached": "其中 {cached_tokens} 个提示词词元来自前缀缓存，不用计算。",
        "total_blocks": "写时复制了 {copied_blocks} 个块。",
        "total_evicted": "有 {evicted_blocks} 个块的内容让位给了别人。",
        "total_preemptions": "发生了 {preemptions} 次抢占。",
        "total_host": "有 {stored_blocks} 个块存到主机内存，{loaded_blocks} 个又拷贝回来。",
        "total_drafts": "猜了 {draft_tokens} 个词元，猜对 {accepted_tokens} 个。",
        "total_forced": "有 {forced_tokens} 个词元由语法定下，没有抽取。",
        "left_prompts": "没有列出 {count} 个提示词的词元。",
        "left_steps": "没有列出 {count} 步的块表和调度原因。",
        "left_draws": "没有列出 {count} 个词元的候选。",
        "left_news": "省略了 {count} 句前面讲过的事。",
        "left_ends": "没有说明 {count} 条序列是怎样结束的。",
    }
)
